"""What must fit together between the sections of a config. Each check raises an error that names the key to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.algorithms import GROUP_ADVANTAGES, VALUE_TARGETS
from posttrain.config.sections import EvalConfig
from posttrain.runs.cluster import check_apart, check_cluster
from posttrain.runs.config_file import key_error
from posttrain.sampler.config import PUBLISHED
from posttrain.trainer.backends import RunNeeds, backend_problem

if TYPE_CHECKING:
    from posttrain.config import RLConfig

SAMPLING_RANKS = "ranks that sample themselves do not run ahead; set cluster.samplers, or leave one of them out"


def check_group(config: RLConfig) -> None:
    estimator, size = config.algorithm.advantage, config.batch.samples_per_prompt
    if estimator in GROUP_ADVANTAGES and size < 2:
        raise key_error(
            "batch.samples_per_prompt",
            f"{estimator} compares the episodes of one prompt with each other and learns nothing from {size}; "
            "use at least 2, or an advantage that needs no group (gae, reinforce, remax)",
        )


def check_pass_at_k(config: RLConfig) -> None:
    if config.algorithm.advantage != "pass_at_k":
        return
    k, size = config.algorithm.options.get("k", 4), config.batch.samples_per_prompt
    if k >= size > 1:
        raise key_error(
            "batch.samples_per_prompt",
            f"{size}, but pass_at_k needs groups of more than k = {k}: of subsets of all there is only one; "
            "raise it, or lower algorithm.options.k",
        )


def check_critic(config: RLConfig) -> None:
    advantage = config.algorithm.advantage
    if advantage in VALUE_TARGETS and config.critic is None:
        raise key_error(
            "algorithm.advantage",
            f"{advantage} needs values: add a `critic:` section (`critic: {{}}` for its defaults)",
        )
    if config.critic is not None and advantage in GROUP_ADVANTAGES:
        raise key_error("critic", f"{advantage} uses no critic; remove the section or choose gae")


def check_data(config: RLConfig) -> None:
    if not config.data.train:
        raise key_error("data", "data.train names no files; there is nothing to train on")
    if config.eval != EvalConfig() and not config.data.eval:
        raise key_error("eval", "there is nothing to evaluate on: set data.eval, or remove this section")


def check_env(config: RLConfig) -> None:
    searching = False
    for place, env in (("env", config.env), *((f"envs.{name}", env) for name, env in config.envs.items())):
        if not env.takes_retriever:
            continue
        searching = True
        if config.retrieval is None:
            raise key_error(place, f"{env.name} searches: add a `retrieval:` section with an index, a corpus or a url")
        if "top_k" in env.options:
            raise key_error(
                f"{place}.options.top_k", "how many passages a search returns is retrieval.top_k; set it there"
            )
    if config.retrieval is not None and not searching:
        raise key_error(
            "retrieval", f"the env {config.env.name} takes no retriever; remove this section or choose another env"
        )


def check_tools(config: RLConfig) -> None:
    given = bool(config.tools or config.mcp)
    places = {"env": config.env, **{f"envs.{name}": env for name, env in config.envs.items()}}
    calling = [(place, env) for place, env in places.items() if env.takes_tools]
    for place, env in calling:
        if not given:
            raise key_error(place, f"{env.name} calls tools: add a `tools:` or `mcp:` section")
        if not isinstance(env.options.get("tools", []), list | tuple):
            raise key_error(f"{place}.options.tools", "a list of names of the `tools` section")
    if given and not calling:
        key = "tools" if config.tools else "mcp"
        raise key_error(key, f"the env {config.env.name} calls no tools; remove this section or choose another env")


def check_best(config: RLConfig) -> None:
    if config.checkpoint.keep_best is None:
        return
    if not config.checkpoint.keep_best.startswith("eval/"):
        raise key_error("checkpoint.keep_best", "choose a metric of the evaluation (eval/...), such as eval/reward")
    if not config.evaluates:
        raise key_error("checkpoint.keep_best", "nothing measures it: set data.eval")
    if config.eval.every == 0 or config.checkpoint.every % config.eval.every:
        raise key_error(
            "checkpoint.every",
            f"{config.checkpoint.every} is no multiple of eval.every = {config.eval.every}, so that checkpoints would "
            "lack the metric that keep_best compares",
        )


def check_asynchronous(config: RLConfig) -> None:
    if config.sampling.max_staleness is not None and config.trainer.ranks > 1 and not config.cluster.samplers:
        raise key_error(
            "sampling.max_staleness",
            f"trainer.ranks is {config.trainer.ranks}; {SAMPLING_RANKS}",
        )


def check_trainer(config: RLConfig) -> None:
    needs = RunNeeds(
        samplers_apart=config.cluster.samplers > 0,
        shards_on_disk=config.checkpoint.sharded,
        compiles=config.model.compile is True,
        adapters=config.model.lora is not None,
        critic=config.critic is not None,
    )
    problem = backend_problem(config.trainer, needs)
    if problem is not None:
        raise key_error(*problem)


def check_layout(config: RLConfig) -> None:
    trainer = config.trainer
    if trainer.tensor_parallel > 1 and config.model.compile is True:
        raise key_error(
            "model.compile",
            f"layers that trainer.tensor_parallel = {trainer.tensor_parallel} divides are not compiled; leave it out",
        )
    if trainer.sequence_parallel == 1 and trainer.sequence_parallel_kind != "auto":
        raise key_error(
            "trainer.sequence_parallel_kind",
            f"{trainer.sequence_parallel_kind} is a way to share micro-batches, and trainer.sequence_parallel is 1; "
            "raise that, or leave this out",
        )


def check_lora(config: RLConfig) -> None:
    if config.model.lora is None:
        return
    if config.trainer.tensor_parallel > 1:
        raise key_error(
            "trainer.tensor_parallel",
            "layers with adapters are not divided; leave it out (trainer.ranks shards them), or leave model.lora out",
        )
    apart = config.sampler.engine == "vllm" and config.cluster.samplers > 0
    if apart and config.sampler.options.get("enable_lora", True) is not True:
        raise key_error(
            "sampler.options.enable_lora",
            "cluster.samplers are given the adapters alone, and never merged ones; leave it out",
        )
    if apart and config.sampler.sleep == 2:
        raise key_error(
            "sampler.sleep",
            "2 gives up all weights, and cluster.samplers are given adapters alone; set 1, which keeps them",
        )


def check_memory(config: RLConfig) -> None:
    longest, room = config.limits.max_episode_tokens, config.batch.tokens_per_micro_batch
    if longest > room:
        raise key_error(
            "batch.tokens_per_micro_batch",
            f"{room} tokens cannot hold an episode of limits.max_episode_tokens = {longest}; set {longest} or more",
        )


def check_sampler(config: RLConfig) -> None:
    if config.sampler.engine == "server":
        raise key_error(
            "sampler.engine",
            "a server's weights are its own: it answers for eval, generate and chat; train with native, vllm or "
            "vllm_server, which gives a vLLM server the policy's weights",
        )
    engine = config.sampler.engine
    if config.sampler.sleep and config.sampling.max_staleness is not None:
        raise key_error(
            "sampler.sleep", "with sampling.max_staleness the engine samples while the trainer works; leave it out"
        )
    apart = config.cluster.samplers > 0
    if engine != "native" and config.trainer.ranks > 1 and not apart:
        fix = "use native" + ("" if engine == "vllm_server" else ", or set cluster.samplers")
        raise key_error("sampler.engine", f"{engine} samples for a run on one rank; on several, {fix}")
    if apart:
        check_apart(config.sampler, config.cluster)
    elif config.sampler.transport == "shared":
        raise key_error("sampler.transport", "shared is for cluster.samplers, and there are none; leave it out")
    elif engine not in PUBLISHED and config.sampler.moves_weights:
        fix = "vllm or vllm_server, or with cluster.samplers"
        raise key_error("sampler", f"transport, folder and max_probe_gap go with sampler.engine: {fix}")
    if config.sampler.engine != "native" and config.sampling.engines is not None:
        raise key_error("sampling.engines", "forwards side by side are the native engine's; leave it out")


def check_placement(config: RLConfig) -> None:
    check_cluster(config.cluster)


CHECKS = (
    check_group,
    check_pass_at_k,
    check_critic,
    check_data,
    check_env,
    check_tools,
    check_best,
    check_memory,
    check_asynchronous,
    check_trainer,
    check_layout,
    check_lora,
    check_sampler,
    check_placement,
)
