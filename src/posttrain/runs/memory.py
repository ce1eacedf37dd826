"""How much memory a process of a run needs, before anything loads: bytes by part, at each moment that may be the peak.

The formulas follow what the code allocates (`trainer/`, `sampler/`), so a change there needs one here; the tests
compare them with measured peaks. P parameters, N ranks, e bytes of a number in the dtype that the model computes in.

    held          P e (+ P 4 masters where e < 4) + P 8 moments; on N ranks P 12 / N in float32, and the sampler's P e
                  with whole weights P e + P 12 / N
    gradients     of one process: P e of a micro-batch, P 4 of the sums over several; on N ranks P 4 / N,
                  P 4 with whole weights
    activations   `activations.py`
    gathered      on N ranks: what belongs to no layer, and two layers; all where layers stay gathered

With adapters masters, moments and gradients are of these alone; weights that do not train are P e / N on N ranks
where weights are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.runs import activations
from posttrain.runs.layout import Layout, MicroBatch, Roles, SamplerRoom
from posttrain.runs.model_shape import ModelShape
from posttrain.trainer.distributed_optimizer import BUCKET_ELEMENTS

GIB = 2**30
ERROR_BAND = 0.15  # estimates are this close to measured peaks; see docs/planning.md
BATCH_BYTES = 90  # of a token in all tensors of a `Batch`, its streams included
CONTEXT = GIB // 2  # CUDA's own, and its libraries'
COMMUNICATOR = GIB // 4  # NCCL's buffers
MOMENTS = 8
MASTER = 4
NOBODY_ELSE = Roles()
NO_SAMPLER = SamplerRoom()


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a step, and what is held there; names of parts are for people."""

    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one process: on its device (which may be the CPU) and, beside a GPU, in the host. Bytes."""

    moments: tuple[Moment, ...]
    outside: dict[str, int]  # what torch's allocator does not know of
    host: dict[str, int]

    @property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def torch_bytes(self) -> int:
        """The peak of torch's allocator."""
        return self.worst.bytes

    @property
    def bytes(self) -> int:
        return self.torch_bytes + sum(self.outside.values())

    def named(self, name: str) -> Moment:
        return next(moment for moment in self.moments if moment.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSetup:
    """Everything that `estimate` needs: models, layout, micro-batches and the sampler of one process."""

    policy: ModelShape
    layout: Layout
    micro_batches: tuple[MicroBatch, ...]  # of an update on one process, in order
    roles: Roles = NOBODY_ELSE
    sampler: SamplerRoom = NO_SAMPLER
    critic: ModelShape | None = None  # None: of the policy's shape
    batch_tokens: int = 0  # of a mini-batch

    @property
    def critic_shape(self) -> ModelShape:
        return self.critic or replace(self.policy, adapters=0, adapter_width=0)


def estimate(setup: ProcessSetup) -> Estimate:
    """See the module's docstring."""
    held = _held(setup)
    moments = [Moment("loading", _loading(setup)), Moment("rollout", {**held, **_rollout(setup)})]
    if setup.sampler.asleep_bytes is not None:
        held = held | {"another engine": 0}
    for number, batch in enumerate(setup.micro_batches):
        moments += [Moment(name, {**held, **parts}) for name, parts in _update(setup, batch, first=number == 0)]
    if setup.roles.critic:
        for batch in setup.micro_batches:
            moments.append(Moment("critic's backward", {**held, **_critic_update(setup, batch)}))
    sums = {"gradients": _sums(setup, setup.policy.trained), "gradients of this rank's masters": _own_sums(setup)}
    moments.append(Moment("optimizer step", {**held, **sums}))
    return Estimate(tuple(_largest_by_name(moments)), _outside(setup), _host(setup))


def _largest_by_name(moments: Sequence[Moment]) -> list[Moment]:
    """The largest of the moments that have the same name (one for each micro-batch), without parts of 0 bytes."""
    best: dict[str, Moment] = {}
    for moment in moments:
        if moment.name not in best or moment.bytes > best[moment.name].bytes:
            best[moment.name] = moment
    return [Moment(m.name, {part: size for part, size in m.parts.items() if size}) for m in best.values()]


# -- what stays from step to step --------------------------------------------------------------------------------------


def _held(setup: ProcessSetup) -> dict[str, int]:
    """What is held all the time once training runs, the optimizer's moments included."""
    shape, layout, roles = setup.policy, setup.layout, setup.roles
    trained, width, ranks = shape.trained, layout.dtype_bytes, layout.ranks
    count = shape.parameters + shape.adapters
    parts: dict[str, int] = {}
    if layout.sharded:
        parts["float32 masters (shards)"] = 0 if layout.offload else trained * MASTER // ranks
        parts["weights that do not train (shards)"] = 0 if layout.offload else shape.frozen * width // ranks
    else:
        parts["policy"] = count * width
        parts["float32 masters"] = 0 if layout.wide and not layout.stretched else trained * MASTER // ranks
    parts["moments of AdamW"] = 0 if layout.offload and layout.sharded else trained * MOMENTS // ranks
    parts["policy, whole, for the sampler"] = count * width if roles.copy else 0
    holders = ranks if layout.sharded else 1
    parts["reference"] = count * width // holders if roles.ref and not (layout.offload and layout.sharded) else 0
    parts["critic, its masters and moments"] = _critic_held(setup)
    return parts | _sampler_held(setup)


def _critic_held(setup: ProcessSetup) -> int:
    layout, count = setup.layout, setup.critic_shape.decoder_parameters
    if not setup.roles.critic or (layout.offload and layout.sharded):
        return 0
    if layout.sharded:
        return count * (MASTER + MOMENTS) // layout.ranks
    masters = 0 if layout.wide and not layout.stretched else MASTER
    return count * layout.dtype_bytes + count * (MOMENTS + masters) // layout.ranks


def _sampler_held(setup: ProcessSetup) -> dict[str, int]:
    """Keys and values stay until the next rollout; so do the graphs."""
    shape, width, room = setup.policy, setup.layout.dtype_bytes, setup.sampler
    graphs = room.batch * (shape.vocabulary + 4 * shape.intermediate + 8 * shape.hidden) * width if room.graphs else 0
    cache = room.rows * room.capacity * shape.key_value_width * width
    return {"keys and values": cache, "CUDA graphs": graphs, "another engine": room.engine_bytes}


# -- moments -----------------------------------------------------------------------------------------------------------


def _loading(setup: ProcessSetup) -> dict[str, int]:
    """The peak while the models load, whole and one after another, before each is sharded.

    The order is policy, reference, the sampler's copy, critic, so the last of them loads beside what the others hold.
    """
    shape, layout, roles = setup.policy, setup.layout, setup.roles
    whole = shape.parameters * layout.dtype_bytes
    later = {"moments of AdamW", "keys and values", "CUDA graphs"}
    held = {name: size for name, size in _held(setup).items() if name not in later}
    if not layout.sharded:
        return held
    if roles.critic:
        return {**held, "critic, whole, while it loads": setup.critic_shape.decoder_parameters * layout.dtype_bytes}
    if roles.copy:
        return held
    return {**held, "policy, whole, while it loads": whole}


def _rollout(setup: ProcessSetup) -> dict[str, int]:
    """Prompts forwarded at once without gradients, and the logits of the tokens drawn first."""
    shape, width, room = setup.policy, setup.layout.dtype_bytes, setup.sampler
    if not room.batch:
        return {}
    insides = 4 * shape.hidden + 3 * shape.intermediate + 2 * shape.query_width + 2 * shape.key_width
    logits = room.batch * shape.vocabulary * (width + 8)
    return {"prompts being forwarded": room.tokens_per_step * insides * width, "logits of a draw": logits}


def _update(setup: ProcessSetup, batch: MicroBatch, *, first: bool) -> list[tuple[str, dict[str, int]]]:
    """The backward pass in the log-probs, in the last layer, with all activations still there, and at its end."""
    layout, workers = setup.layout, _workers(setup)
    shape = setup.policy.part(layout.tensor_parallel)
    kept, working = activations.of_head(shape, layout, batch)
    insides = activations.of_layers(shape, layout, batch) + activations.of_last_norm(shape, layout, batch)
    in_layer = insides + activations.computed_again(shape, layout, batch)
    head = 0 if shape.adapters else shape.embedding * layout.dtype_bytes  # its gradient
    common = {"batch": setup.batch_tokens * BATCH_BYTES} | _gathered(shape, layout)
    sums = 0 if first else _sums(setup, setup.policy.trained)
    # beside the head's; untied it is that of a parameter, and counted with these where they keep theirs
    of_embedding = head * (2 if layout.sharded else int(shape.tied or layout.stretched))
    if layout.tensor_parallel > 1:  # of the whole, before each rank takes its part
        of_embedding += setup.policy.embedding * layout.dtype_bytes
    in_log_probs = common | {
        "gradients": sums, "activations": workers * (insides + kept), "logits, gradient of the head": workers * working,
    }  # fmt: skip
    in_last_layer = common | {
        "gradients": sums + workers * head,
        "activations": workers * in_layer,
        "gradients of a layer": workers * activations.passing(shape, layout, batch) + _reducing(shape, layout),
    }
    at_the_end = common | {
        "gradients": (_sums(setup, setup.policy.trained) if layout.ranks > 1 else sums)
        + _of_micro_batch(setup, shape.trained),
        "activations": workers * activations.of_layer(shape, layout, batch),
        "gradient of the embedding": workers * of_embedding + _reducing_outside(shape, layout),
    }
    summed = _sums(setup, setup.policy.trained) * (0 if first and layout.wide and workers == layout.ranks == 1 else 1)
    return [
        ("backward: log-probs", in_log_probs),
        ("backward: last layer", in_last_layer),
        ("backward: end", at_the_end),
        ("gradients summed", common | {"gradients": summed + _of_micro_batch(setup, shape.trained)}),
    ]


def _workers(setup: ProcessSetup) -> int:
    return setup.layout.workers if len(setup.micro_batches) > 1 else 1


def _critic_update(setup: ProcessSetup, batch: MicroBatch) -> dict[str, int]:
    layout = setup.layout
    shape = setup.critic_shape.part(layout.tensor_parallel)
    insides = activations.of_layers(shape, layout, batch) + activations.of_last_norm(shape, layout, batch)
    insides += activations.computed_again(shape, layout, batch)
    workers = _workers(setup)
    return _gathered(shape, layout) | {
        "gradients": _sums(setup, setup.critic_shape.decoder_parameters) if len(setup.micro_batches) > 1 else 0,
        "activations": workers * insides,
        "gradients of a layer": workers * activations.passing(shape, layout, batch) + _reducing(shape, layout),
    }


def _sums(setup: ProcessSetup, count: int) -> int:
    """The float32 sums of gradients that the optimizer steps with; unsharded where layers stay gathered."""
    layout = setup.layout
    if layout.stretched:
        return count * MASTER
    if layout.sharded and not layout.reshard_after_forward and len(setup.micro_batches) > 1:
        return count * MASTER // layout.tensor_parallel
    return 0 if layout.sharded and layout.offload else count * MASTER // layout.ranks


def _own_sums(setup: ProcessSetup) -> int:
    """`_sums` of a DistributedOptimizer: this rank's stretches, and one bucket being reduced, which gloo copies."""
    layout, trained = setup.layout, setup.policy.trained
    if not layout.stretched:
        return 0
    copied = min(trained, BUCKET_ELEMENTS) if layout.device == "cpu" else 0
    return trained * MASTER // layout.ranks + copied * MASTER


def _of_micro_batch(setup: ProcessSetup, count: int) -> int:
    """Gradients as a backward pass leaves them; on several ranks they are reduced or summed on the way."""
    layout = setup.layout
    return 0 if layout.ranks > 1 else _workers(setup) * count * layout.dtype_bytes


# -- FSDP --------------------------------------------------------------------------------------------------------------


def _gathered(shape: ModelShape, layout: Layout) -> dict[str, int]:
    """What belongs to no layer stays gathered; a layer is there while it is worked on, and the next one arrives."""
    if not layout.sharded:
        return {}
    layers = min(2, shape.layers) if layout.reshard_after_forward else shape.layers
    return {"gathered weights": (shape.outside + layers * shape.layer_parameters) * layout.dtype_bytes}


def _reducing(shape: ModelShape, layout: Layout) -> int:
    """A layer's gradients, and their float32 copy on its way to the shards."""
    return shape.trained_layer * (layout.dtype_bytes + 4) if layout.sharded else 0


def _reducing_outside(shape: ModelShape, layout: Layout) -> int:
    """What belongs to no layer is reduced last."""
    return shape.trained_outside * 4 if layout.sharded else 0


# -- beside torch ------------------------------------------------------------------------------------------------------


def _outside(setup: ProcessSetup) -> dict[str, int]:
    if setup.layout.device == "cpu":
        return {}
    layout = setup.layout
    groups = sum(size > 1 for size in (layout.ranks, layout.tensor_parallel, layout.sequence_parallel))
    parts = {"CUDA context": CONTEXT} | ({"NCCL": groups * COMMUNICATOR} if groups else {})
    beside = setup.sampler.processes
    return parts | ({"CUDA contexts of samplers": beside * CONTEXT} if beside else {})


def _host(setup: ProcessSetup) -> dict[str, int]:
    """Host memory of a process with a GPU: what is offloaded, and a model while it loads."""
    layout, shape = setup.layout, setup.policy
    if layout.device == "cpu":
        return {}
    parts = {"a model while it loads": shape.parameters * layout.dtype_bytes}
    if setup.sampler.asleep_bytes:
        parts["another engine, asleep"] = setup.sampler.asleep_bytes
    if layout.offload and layout.sharded:
        trained = shape.trained + (setup.critic_shape.decoder_parameters if setup.roles.critic else 0)
        frozen = (shape.frozen + (shape.parameters if setup.roles.ref else 0)) * layout.dtype_bytes
        shards = trained * (MASTER + MOMENTS + MASTER) + frozen
        parts["shards, moments and gradients"] = shards // layout.ranks
    return parts
