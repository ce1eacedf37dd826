"""Agent frameworks from the registry, unmodified, against the endpoint."""

from __future__ import annotations

import pytest

from endpoint.parts import called, in_turn, play
from posttrain.rollout import Limits
from posttrain.trajectory import CallStatus, Source

QUESTION = "Where is the tower?"


def test_openai_agents_with_a_function_tool_is_one_conversation():
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def look(query: str) -> str:
        """Looks something up."""
        asked.append(query)
        return "It is in Paris."

    async def agent(task, base_url, api_key):
        http_client = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
            model = agents.OpenAIChatCompletionsModel("policy", client)
            scout = agents.Agent(name="scout", instructions="Be brief.", tools=[look], model=model)
            done = await agents.Runner.run(scout, QUESTION)
        return done.final_output

    script = ["I look. " + called("tower"), called("tower Paris") + called("tower Rome"), "In Paris."]
    played = play(agent, script)
    assert asked == ["tower", "tower Paris", "tower Rome"]
    assert played.episode.answer == "In Paris."
    assert played.written == [[f"{line}<|im_end|>" for line in script]], "one trajectory: nothing was rewritten"
    assert played.texts[0].count("It is in Paris.") == 3
    assert [call.status for call in played.episode.calls] == [CallStatus.OK] * 3


def test_openai_agents_streamed_and_with_a_handoff():
    """The second agent has other instructions, so it sees the conversation in a context of its own."""
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def agent(task, base_url, api_key):
        http_client = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
            model = agents.OpenAIChatCompletionsModel("policy", client)
            expert = agents.Agent(name="expert", instructions="You know towers.", model=model)
            scout = agents.Agent(name="scout", instructions="Ask the expert.", handoffs=[expert], model=model)
            run = agents.Runner.run_streamed(scout, QUESTION)
            async for _ in run.stream_events():
                pass
        return run.final_output

    script = in_turn('<tool_call>{"name": "transfer_to_expert", "arguments": {}}</tool_call>', "In Paris.")
    played = play(agent, script)
    assert played.episode.answer == "In Paris."
    assert [len(turns) for turns in played.written] == [1, 1]
    assert "You know towers." in played.texts[1]


def test_smolagents_rewrites_its_history_and_every_step_trains_in_its_true_context():
    smolagents = pytest.importorskip("smolagents")
    asked = []

    class Look(smolagents.Tool):
        name, description, output_type = "look", "Looks something up.", "string"
        inputs = {"query": {"type": "string", "description": "what"}}  # noqa: RUF012

        def forward(self, query: str) -> str:
            asked.append(query)
            return "It is in Paris."

    def agent(task, base_url, api_key):
        model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key)
        return str(smolagents.ToolCallingAgent(tools=[Look()], model=model, verbosity_level=0).run(QUESTION))

    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "Paris"}}</tool_call>'
    limits = Limits(max_prompt_tokens=8000, max_episode_tokens=9000)  # bytes are tokens here
    played = play(agent, in_turn(called("tower"), final), limits=limits)
    assert asked == ["tower"]
    assert played.episode.answer == "Paris"
    assert played.written == [[called("tower") + "<|im_end|>"], [final + "<|im_end|>"]]
    assert "It is in Paris." in played.texts[1]
    assert all(t.source[0] is Source.PROMPT for t in played.trajectories)
