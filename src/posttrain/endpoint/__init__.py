"""The policy behind an OpenAI-compatible endpoint: programs that know nothing of training are trained through it.

Every call of one run of an agent is recorded token by token; what it said before is never tokenised again. Start at
`agent.ExternalAgent`; read on in the order episode (one run), desk (one answer), recording (tokens), calls, wire
(JSON), app and serving (HTTP).

The room stands beside `rollout`, which plays an episode by asking an env for steps: here the roles are swapped, the
agent asks for completions. Both turn a sampler's answers into trajectories, under the same limits and seeds.
"""

from posttrain.endpoint.agent import ExternalAgent
from posttrain.endpoint.episode import AgentEpisode
from posttrain.endpoint.serving import Host

__all__ = ["AgentEpisode", "ExternalAgent", "Host"]
