"""Routing of a run put on disk, and expert ids for the model that its routers did not choose.

A record is a folder: ``routing.json`` with a :class:`Shape`, and in ``step-N/rank-R.safetensors``
what data parallel rank R saw of step N, a row a sequence:

=============  =================================================================
``number``     of the sequence in the global batch, int64
``checksum``   of its tokens, int64
``expert_ids`` int16, MoE layers x tokens x top-k
=============  =================================================================

A sequence has the same number in any layout (:mod:`torchtitan_ext.data.dataset`), so a record made
on some ranks can be replayed on others.

Shapes: B sequences of a micro-batch, S their length, T = B * S, L MoE layers, K top-k.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchtitan.config import JobConfig

from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.distributed.routed_part import RoutedPart
from torchtitan_ext.moe import MoEArgs
from torchtitan_ext.moe.presets import preset_expert_ids

from .random_state import Place

FOLDER = "routing"
_SHAPE_FILE = "routing.json"


@dataclass(frozen=True)
class Shape:
    """What a record and the run that replays it must have in common."""

    moe_layers: int
    num_experts: int
    top_k: int
    seq_len: int
    global_batch_size: int


@dataclass(frozen=True)
class Share:
    """Which sequences of the global batch a data parallel rank sees."""

    data_rank: int
    num_data_ranks: int
    local_batch_size: int

    def numbers(self, micro_batch: int) -> list[int]:
        """Their numbers, as :class:`torchtitan_ext.data.dataset.TextDataset` deals them out."""
        first = micro_batch * self.local_batch_size
        rows = range(first, first + self.local_batch_size)
        return [row * self.num_data_ranks + self.data_rank for row in rows]


class StepRouting:
    """What [routing] asks of the steps of a run; without it, every method does nothing."""

    def __init__(
        self,
        job_config: JobConfig,
        model_parts: Sequence[nn.Module],
        parallel_dims: ExtParallelDims,
        place: Place,
    ) -> None:
        self._source: RecordedRouting | PresetRouting | None = None
        self._recorder: RoutingRecorder | None = None
        settings = job_config.routing
        preset = "balanced" if job_config.debug.moe_force_load_balance else settings.preset
        if settings.replay is None and preset == "none" and not settings.record:
            return
        local_batch_size = job_config.training.local_batch_size
        share = Share(place.data, parallel_dims.num_data_ranks, local_batch_size)
        self._part = RoutedPart(model_parts, parallel_dims, job_config.training.seq_len)
        layers = self._part.layers
        assert layers.args is not None, "refused for a model without experts"
        shape = shape_of(job_config, share.num_data_ranks, layers.args, layers.num_layers)
        if settings.replay is not None:
            self._source = RecordedRouting(Path(settings.replay) / FOLDER, share)
        elif preset != "none":
            degree = job_config.parallelism.expert_parallel_degree
            self._source = PresetRouting(preset, shape, share, degree)
        if settings.record:
            writer = RoutingWriter(Path(job_config.job.dump_folder) / FOLDER, shape, share)
            self._recorder = RoutingRecorder(writer, self._part, place)

    @property
    def records(self) -> bool:
        """Whether :meth:`add` has any use for what it is given."""
        return self._recorder is not None

    def start(self, last_step: int) -> None:
        """Before the first step of a run; a collective if it records."""
        if self._recorder is not None:
            self._recorder.start(last_step)

    def arguments(self, step: int, micro_batch: int, tokens_BS: torch.Tensor) -> dict[str, Any]:
        """What the model's forward takes in addition.

        Args:
            tokens_BS: whole sequences, also where this rank routes a part of them.
        """
        if self._source is None:
            return {}
        own = self._part.own(self._source.expert_ids(step, micro_batch, tokens_BS))
        # A schedule can't split a dictionary without tensors.
        return {"given_expert_ids": own} if own else {}

    def add(self, tokens_BS: torch.Tensor, expert_ids: Sequence[torch.Tensor]) -> None:
        """After the forward of a micro-batch of whole sequences; the ids are this rank's."""
        if self._recorder is not None:
            self._recorder.add(tokens_BS, expert_ids)

    def finish_step(self, step: int) -> None:
        """After the last micro-batch of a step; a collective if it records."""
        if self._recorder is not None:
            self._recorder.finish_step(step)


class RoutingRecorder:
    """Collects the decisions of the ranks that share sequences; the first of them writes."""

    def __init__(self, writer: "RoutingWriter", part: RoutedPart, place: Place) -> None:
        self._writer, self._part = writer, part
        self._is_first = place == Place(data=0)
        self._writes = place == Place(data=place.data)
        self._micro_batches: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def start(self, last_step: int) -> None:
        """As :meth:`RoutingWriter.start`; a collective."""
        if self._is_first:
            self._writer.start(last_step)
        dist.barrier()

    def add(self, tokens_BS: torch.Tensor, expert_ids: Sequence[torch.Tensor]) -> None:
        """Takes a micro-batch's whole sequences and the (t, K) expert ids of this rank's layers."""
        ids_lBsK = None
        if expert_ids:
            ids_lBsK = self._part.split_sequences(torch.stack(list(expert_ids)).short())
        self._micro_batches.append((checksums(tokens_BS), ids_lBsK))

    def finish_step(self, step: int) -> None:
        """Writes all micro-batches of the step; a collective."""
        of_tokens, ids = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        own = [ids_lBsK for ids_lBsK in ids if ids_lBsK is not None]
        ids_LBSK = self._part.gather(torch.cat(own, dim=1) if own else None)
        if self._writes:
            self._writer.write(step, torch.cat(of_tokens), ids_LBSK)


class RoutingWriter:
    """Writes the experts that a data parallel rank's tokens went to, a file a step."""

    def __init__(self, folder: Path, shape: Shape, share: Share) -> None:
        self._folder, self._shape, self._share = folder, shape, share

    def start(self, last_step: int) -> None:
        """On one rank: drops what an earlier run has recorded after ``last_step``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for step in _steps(self._folder):
            if step > last_step:
                shutil.rmtree(_step_folder(self._folder, step))
        (self._folder / _SHAPE_FILE).write_text(json.dumps(asdict(self._shape)) + "\n")

    def write(self, step: int, checksums_B: torch.Tensor, ids_LBSK: torch.Tensor) -> None:
        """Writes all sequences of a step, int64 checksums and int16 ids."""
        num_micro_batches = len(checksums_B) // self._share.local_batch_size
        numbers = [n for i in range(num_micro_batches) for n in self._share.numbers(i)]
        folder = _step_folder(self._folder, step)
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{self._share.data_rank}.safetensors"
        save_file(
            {
                "number": torch.tensor(numbers),
                "checksum": checksums_B.cpu(),
                "expert_ids": ids_LBSK.transpose(0, 1).contiguous(),
            },
            path.with_suffix(".part"),
        )
        os.replace(path.with_suffix(".part"), path)  # a file is there only if it is whole


class RecordedRouting:
    """Reads back where the tokens of a step went. A rank opens its own file, others if it must."""

    def __init__(self, folder: Path, share: Share) -> None:
        self._folder, self._share = folder, share
        self._step = 0
        self._files: list[Path] = []
        self._rows: dict[int, tuple[int, torch.Tensor]] = {}

    def expert_ids(
        self, step: int, micro_batch: int, tokens_BS: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The recorded experts of these tokens, (T, K) a MoE layer.

        Raises:
            ValueError: the step was not recorded, or with other tokens.
        """
        if step != self._step:
            self._open(step)
        numbers = self._share.numbers(micro_batch)
        rows = [self._row(number) for number in numbers]
        for number, (recorded, _), found in zip(
            numbers, rows, checksums(tokens_BS).tolist(), strict=True
        ):
            if recorded != found:
                raise ValueError(
                    f'[routing] replay = "{self._folder.parent}": sequence {number} of step '
                    f"{step} has other tokens than the recorded one"
                )
        ids_LBSK = torch.stack([ids_LSK for _, ids_LSK in rows], dim=1).long()
        return ids_LBSK.flatten(1, 2).to(tokens_BS.device).unbind(0)

    def _open(self, step: int) -> None:
        self._step, self._rows = step, {}
        own = f"rank-{self._share.data_rank}.safetensors"
        files = _step_folder(self._folder, step).glob("rank-*.safetensors")
        # The next one to open is the last of the list.
        self._files = sorted(files, key=lambda path: path.name == own)

    def _row(self, number: int) -> tuple[int, torch.Tensor]:
        while number not in self._rows:
            if not self._files:
                raise ValueError(
                    f'[routing] replay = "{self._folder.parent}": sequence {number} of step '
                    f"{self._step} was not recorded"
                )
            record = load_file(self._files.pop())
            rows = zip(record["checksum"].tolist(), record["expert_ids"], strict=True)
            self._rows.update(zip(record["number"].tolist(), rows, strict=True))
        return self._rows[number]


@dataclass(frozen=True)
class PresetRouting:
    """Where the tokens of a step go by a preset of :mod:`torchtitan_ext.moe.presets`."""

    preset: str
    shape: Shape
    share: Share
    expert_parallel_degree: int

    def expert_ids(
        self, step: int, micro_batch: int, tokens_BS: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The experts of these tokens, (T, K), the same in each MoE layer."""
        numbers_B, seq_len = torch.tensor(self.share.numbers(micro_batch)), tokens_BS.shape[1]
        ids_TK = preset_expert_ids(
            self.preset,
            step,
            (numbers_B.unsqueeze(1) * seq_len + torch.arange(seq_len)).flatten(),
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            num_ranks=self.expert_parallel_degree,
        )
        return (ids_TK.to(tokens_BS.device),) * self.shape.moe_layers


def shape_of(job_config: JobConfig, num_data_ranks: int, args: MoEArgs, moe_layers: int) -> Shape:
    """The shape of a run's record."""
    training = job_config.training
    batch = training.global_batch_size
    if batch == -1:
        batch = training.local_batch_size * num_data_ranks
    return Shape(moe_layers, args.num_experts, args.top_k, training.seq_len, batch)


def read_shape(folder: Path) -> Shape:
    """Raises ValueError if there is no record in the folder."""
    try:
        return Shape(**json.loads((folder / _SHAPE_FILE).read_text()))
    except (OSError, TypeError, ValueError):
        raise ValueError(f"no record of routing: {folder / _SHAPE_FILE} can't be read") from None


def recorded_steps(folder: Path, num_sequences: int) -> list[int]:
    """The steps of a record that have so many sequences or more, in order."""
    return [s for s in _steps(folder) if _num_sequences(folder, s) >= num_sequences]


def _steps(folder: Path) -> list[int]:
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _num_sequences(folder: Path, step: int) -> int:
    """Reads the heads of the files alone."""
    num_sequences = 0
    for path in _step_folder(folder, step).glob("rank-*.safetensors"):
        with safe_open(path, "pt") as file:
            num_sequences += file.get_slice("number").get_shape()[0]
    return num_sequences


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def checksums(tokens_BS: torch.Tensor) -> torch.Tensor:
    """A number of each sequence that depends on every token and its place, int64."""
    places_S = torch.arange(1, tokens_BS.shape[1] + 1, device=tokens_BS.device)
    # Odd multiples of the golden ratio's 64 bits; products and their sum wrap around.
    factors_S = (places_S * -0x61C8864680B583EB) | 1
    return ((tokens_BS.long() + 1) * factors_S).sum(1)
