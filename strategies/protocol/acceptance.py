"""Whether a reply is taken: what it says is held against what was asked, and what it sends against the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import torch
from flwr.app import Message

from common import vector
from common.compression.feedback import Kind
from common.metrics.metric import Metric
from common.tasks.scoring import Measured
from common.vector import State
from strategies.protocol.coordinator import FEWEST_JUDGED, Coordinator, spoilt
from strategies.protocol.members import Member
from strategies.protocol.messages import DENIED, WAITING, Refused, Reply, ReplyHead, Undecided, read_reply, upload_seed
from strategies.protocol.work import Upload

_LARGEST = {torch.float64: math.sqrt(torch.finfo(torch.float64).max)}


def largest(dtype: torch.dtype) -> float:
    """The norm from which on a vector is as good as not finite: training on would overflow in the first square."""
    return _LARGEST.get(dtype, math.sqrt(torch.finfo(torch.float32).max))


@dataclass
class Verdict:
    """What came of the replies to one exchange.

    `uploads` are valid; `refused` is why the others are not, by name; `lost` names clients that lost memory which
    server state is bound to; `bytes` is what all replies hold.
    """

    uploads: list[Upload] = field(default_factory=list)
    refused: dict[str, Refused] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    bytes: int = 0


def judge(
    coordinator: Coordinator, round: int, replies: Mapping[str, Message | None], phase: str = "", missing: str = ""
) -> Verdict:
    """Read and check the replies to a round's messages, by name; `missing` is the cause where there is None."""
    verdict = Verdict()
    for name, message in replies.items():
        try:
            if message is None:
                raise Refused(missing)
            reply = read_reply(message)
            verdict.bytes += reply.bytes
            verdict.uploads.append(accepted_upload(coordinator, round, name, reply, phase))
        except Refused as error:
            verdict.refused[name] = error
            if error.cause == "memory-lost" and coordinator.lost_memory(name):
                verdict.lost.append(name)
    _drop_outliers(coordinator, verdict)
    return verdict


def _drop_outliers(coordinator: Coordinator, verdict: Verdict) -> None:
    """Take out uploads with a vector `round.norm_factor` times longer than the usual one.

    Usual is the lower median of this cohort, which a minority cannot move, or that of an earlier round if it was
    larger: as a run converges most updates become tiny, and one client that still learns is no liar.
    """
    factor = coordinator.experiment.round.norm_factor
    if not factor:
        return
    for group in {group: None for upload in verdict.uploads for group in upload.norms}:
        sizes = {upload.name: upload.norms[group] for upload in verdict.uploads if group in upload.norms}
        if len(sizes) < FEWEST_JUDGED:
            continue
        usual = max(median_low(sizes.values()), coordinator.usual.get(group, 0.0))
        far = {name: size for name, size in sizes.items() if size > factor * usual > 0}
        for name, size in far.items():
            verdict.refused[name] = Refused(
                "outlier",
                f"{group} has norm {size:.3g}, {size / usual:.3g} times the usual {usual:.3g}; round.norm_factor = "
                f"{factor:g} allows less",
            )
        verdict.uploads = [upload for upload in verdict.uploads if upload.name not in far]


def accepted_upload(coordinator: Coordinator, round: int, name: str, reply: Reply, phase: str = "") -> Upload:
    """The upload in a reply from client `name`, or Refused with the reason: nothing unchecked meets the model."""
    head, strategy = reply.head, coordinator.strategy
    asked = (coordinator.run, name, coordinator.generation, round, coordinator.layout)
    told = (head.run, head.client, head.generation, head.round, head.layout)
    if told != asked:
        raise Refused("mismatch", f"expected run, client, generation, round, layout {asked}, got {told}")
    if head.status != "ok":
        raise _not_ok(head)
    if not 0 < head.examples <= coordinator.known[name]:
        raise Refused("examples", f"{head.examples} not in 1..{coordinator.known[name]}, the roll's number")
    least, most = 0 if phase else 1, coordinator.bounds.get(name, head.steps)
    if not least <= head.steps <= most:
        raise Refused("steps", f"{head.steps} local steps, asked for {most} at most")
    if head.lr != coordinator.lr(round):
        raise Refused("mismatch", f"local rate {head.lr}, expected {coordinator.lr(round)}")
    if head.part != coordinator.part(name):
        raise Refused("mismatch", f"trackers for a part of {head.part}, expected {coordinator.part(name)}: its release")
    payload = strategy.survey if phase else strategy.expects(coordinator.assigned.get(name, {}))
    upload = Upload({}, name, head.examples, head.steps, head.lr, metrics=reply.metrics, layout=coordinator.slots)
    upload.settings = coordinator.experiment.local
    upload.vectors, upload.copies = _decoded(coordinator, round, name, reply.state, payload)
    if not phase:
        _same_groups("buffers", reply.buffers, coordinator.buffers.keys())
        for group, own in coordinator.buffers.items():
            _same_layout(group, reply.buffers[group], own)
        upload.buffers = reply.buffers
    _check_values(coordinator, upload, payload)
    try:
        strategy.check_upload(upload)
    except ValueError as error:
        raise Refused("meaningless", str(error)) from None
    return upload


def measured(coordinator: Coordinator, member: Member, reply: Reply, metrics: Mapping[str, Metric]) -> Measured:
    """What a client measured the present model to be, or Refused with the reason; `metrics`: those made of sums."""
    head = reply.head
    asked = (coordinator.run, member.name, coordinator.round, coordinator.layout)
    told = (head.run, head.client, head.round, head.layout)
    if told != asked:
        raise Refused("mismatch", f"expected run, client, round, layout {asked}, got {told}")
    if head.status != "ok":
        raise _not_ok(head)
    if not 0 < head.examples <= member.evaluation:
        raise Refused("examples", f"{head.examples} not in 1..{member.evaluation}, the roll's number")
    sizes, sent = {name: metric.size for name, metric in metrics.items()}, reply.sums
    if {name: len(sums) for name, sums in sent.items()} != sizes:
        said = ", ".join(f"{name} ({len(sums)})" for name, sums in sorted(sent.items())) or "none"
        raise Refused("malformed", f"sums of metrics: {said}; asked for {sizes}")
    if twice := sorted(reply.metrics.keys() & sent.keys()):
        raise Refused("malformed", f"metric {twice[0]} comes twice")
    sums = {name: torch.tensor(sent[name], dtype=torch.float64) for name in sizes}
    return Measured(head.examples, reply.metrics, sums)


def _not_ok(head: ReplyHead) -> Refused:
    undecided = head.status == "refused" and head.state in (WAITING, DENIED)
    return Undecided(head.state, head.client) if undecided else Refused(head.status, head.reason)


def _decoded(
    coordinator: Coordinator, round: int, name: str, sent: State, payload: Mapping[str, Kind]
) -> tuple[State, State]:
    """What a client means by what it sent: vectors by group, and the new copies of this client."""
    model, prefix, seed = coordinator.state["model"], f"{name}/", coordinator.experiment.seed
    held = {key.removeprefix(prefix): v for key, v in coordinator.copies.items() if key.startswith(prefix)}
    try:
        vectors, copies = coordinator.codec.decode(
            sent, payload, model, held, lambda group: upload_seed(seed, name, round, group)
        )
    except ValueError as error:
        raise Refused("layout", str(error)) from None
    _same_groups("upload", vectors, payload.keys())
    for group, kind in payload.items():
        like = torch.empty((), dtype=torch.float64) if kind == "scalar" else model
        _same_layout(group, vectors[group], like)
    return vectors, {f"{name}/{key}": value for key, value in copies.items()}


def _check_values(coordinator: Coordinator, upload: Upload, payload: Mapping[str, Kind]) -> None:
    """Finite numbers alone that can be computed with, and no vector longer than `round.max_upload_norm`; notes the
    norms."""
    bound = coordinator.experiment.round.max_upload_norm
    for group, value in upload.vectors.items():
        size = vector.norm(value)
        if not math.isfinite(size):
            raise Refused("not finite", f"{group} holds NaN or Inf")
        upload.metrics[f"norm.{group}"] = size
        if payload[group] == "scalar":
            continue
        if size > largest(value.dtype):
            raise Refused("not finite", f"{group} has norm {size:.3g}, whose square overflows")
        if bound is not None and size > bound:
            raise Refused("norm", f"{group} has norm {size:.6g} > round.max_upload_norm = {bound:g}")
        upload.norms[group] = size
    for group, value in upload.buffers.items():
        if spoilt(value, coordinator.buffers[group]):
            raise Refused("not finite", f"{group} holds NaN or Inf")
        if value.is_floating_point() and math.isfinite(size := vector.norm(value)):
            if size > largest(value.dtype):
                raise Refused("not finite", f"{group} has norm {size:.3g}, whose square overflows")
            upload.norms[group] = size
    if not math.isfinite(loss := upload.metrics.get("loss", math.nan)):
        raise Refused("not finite", f"training loss {loss}")


def _same_groups(what: str, got: Mapping[str, object], expected: Iterable[str]) -> None:
    if set(got) != set(expected):
        raise Refused("layout", f"{what} {sorted(got)}, expected {sorted(expected)}")


def _same_layout(group: str, got: torch.Tensor, like: torch.Tensor) -> None:
    if got.shape != like.shape or got.dtype != like.dtype:
        raise Refused("layout", f"{group} is {got.dtype} {tuple(got.shape)}, expected {like.dtype} {tuple(like.shape)}")
