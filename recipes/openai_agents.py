"""A search agent written with the OpenAI Agents SDK (`pip install openai-agents`). Nothing in it knows of training.

posttrain calls `agent` once per episode and trains the policy behind `base_url`; see openai_agents.yaml.
"""

from __future__ import annotations

from functools import cache

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from posttrain.envs.search import format_passages
from posttrain.envs.tiny_world import passages
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.protocol import Passage
from posttrain.task import Task

set_tracing_disabled(True)  # it would send every run to OpenAI
MAX_TURNS = 4


@cache
def library() -> BM25Retriever:
    return BM25Retriever.from_passages(Passage(row["id"], row["contents"]) for row in passages(seed=0))


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Shared by all agents: a client of its own for each would load the system's certificates each time."""
    return DefaultAsyncHttpxClient()


@function_tool
async def search(query: str) -> str:
    """Finds passages about a person, a place or an organisation."""
    (found,) = await library().retrieve([query], 2)
    return format_passages(found)


async def agent(task: Task, base_url: str, api_key: str) -> str:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    searcher = Agent(name="searcher", tools=[search], model=OpenAIChatCompletionsModel("policy", client))
    try:
        done = await Runner.run(searcher, task.prompt[-1]["content"], max_turns=MAX_TURNS)
    except MaxTurnsExceeded:
        return ""  # the policy's own fault: no answer. Everything else that is raised makes the episode invalid
    return str(done.final_output)
