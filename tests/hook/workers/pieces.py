"""Two ranks hand their sub-checkpoints to a writer, and new engines take them from a reader."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ds_ckpt_hook import subcheckpoints
from ds_ckpt_hook.errors import HookError
from ds_ckpt_hook.subcheckpoints import Subcheckpoint
from tests.hook.workers.common import Reporter, start

WIDTH = 16
BF16 = {"enabled": True}
folder = Path(sys.argv[1])
deepspeed = start()
rank = deepspeed.comm.get_rank()
report = Reporter(folder)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import (  # noqa: E402
    split_params_into_different_moe_groups_for_optimizer as split_by_group,
)


class Store:
    """A folder of pieces whose names say nothing; ``spoil`` may change what a reader gets."""

    def __init__(self) -> None:
        self.folder = folder / "pieces"
        self.folder.mkdir(exist_ok=True)
        self.refuse: Callable[[Subcheckpoint], bool] = lambda _: False
        self.spoil: Callable[[Subcheckpoint, bytes], bytes] = lambda _, data: data
        self.keeps_errors = False
        self.asked: list[str] = []
        self.largest = 0
        self.beside: set[str] = set()

    def path(self, sub: Subcheckpoint) -> Path:
        named = f"{sub.tag} {sub.role} {sub.key} {sub.step} {sub.ranks} {sub.topology}"
        return self.folder / hashlib.sha256(named.encode()).hexdigest()[:20]

    @contextlib.contextmanager
    def writer(self, sub: Subcheckpoint) -> Iterator[IO[bytes]]:
        self.asked.append(sub.key)
        path = self.path(sub)
        with open(f"{path}.part", "wb", buffering=0) as file:

            class Stream:
                def write(stream, data: bytes) -> int:  # noqa: N805
                    if self.refuse(sub):
                        raise OSError(28, "No space left on the device of the test")
                    assert isinstance(data, bytes)
                    self.largest = max(self.largest, len(data))
                    return file.write(data[: max(1, len(data) // 2)])  # as a socket might

            try:
                yield Stream()  # type: ignore[misc]
            except OSError:
                if not self.keeps_errors:
                    raise
        self.beside |= set(glob.glob(f"{tempfile.gettempdir()}/ds_ckpt_*/**/*.pt", recursive=True))
        Path(f"{path}.part").rename(path)

    @contextlib.contextmanager
    def reader(self, sub: Subcheckpoint) -> Iterator[IO[bytes]]:
        self.asked.append(sub.key)
        with io.BytesIO(self.spoil(sub, self.path(sub).read_bytes())) as file:
            yield file


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }


def dense(seed: int, stage: int, width: int = WIDTH, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, **more))[0]


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, use_rts=False)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs: Any) -> Any:
        return self.last(self.experts(self.first(inputs))[0])


def moe(seed: int, stage: int) -> Any:
    torch.manual_seed(seed)
    model = Experts()
    groups = split_by_group({"params": list(model.parameters()), "name": "parameters"})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]


def pipeline(seed: int, stage: int) -> Any:
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(
        layers=[*layers, torch.nn.Linear(WIDTH, 1)],
        num_stages=2,
        loss_fn=torch.nn.functional.mse_loss,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    more = {"gradient_accumulation_steps": 2}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, **more))[0]


def step(engine: Any, width: int = WIDTH) -> str:
    """One step on data made of (step, rank) alone; the loss to the last bit."""
    if hasattr(engine, "train_batch"):
        generator = torch.Generator().manual_seed(engine.global_steps)
        inputs = [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]
        batches = iter([(each, each.sum(-1, keepdim=True)) for each in inputs])
        return float(engine.train_batch(batches)).hex()
    generator = torch.Generator().manual_seed(1000 * engine.global_steps + rank)
    inputs = torch.randn(4, width, generator=generator)
    outputs = engine(inputs.to(next(engine.parameters()).dtype))
    loss = torch.nn.functional.mse_loss(outputs.float(), inputs.sum(-1, keepdim=True))
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total).hex()


def state_of(engine: Any) -> str:
    """A sum over all that a load would change."""
    digest = hashlib.sha256(str(engine.global_steps).encode())
    tensors = [p.data for p in engine.parameters()]
    for state in engine.optimizer.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HookError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resumes(label: str, make: Callable[[int], Any]) -> Any:
    """Save one engine, load another, and report the losses of both from there on."""
    first = make(0)
    step(first), step(first)
    store, own = Store(), first.checkpoint_engine
    state = {"of": label, "rank": rank, "tensor": torch.arange(3)}
    subcheckpoints.save(first, store.writer, tag=label, client_state=state)
    written, store.asked = store.asked, []
    is_back = first.checkpoint_engine is own
    losses = [step(first), step(first)]
    second = make(1)
    loaded = subcheckpoints.load(second, store.reader, tag=label)
    dist.barrier()
    report(
        label=label,
        written=written,
        read=store.asked,
        largest=store.largest,
        beside=sorted(store.beside),
        left=glob.glob(f"{tempfile.gettempdir()}/ds_ckpt_*"),
        is_back=is_back,
        client_state={**loaded, "tensor": loaded["tensor"].tolist()},
        losses=losses,
        resumed=[step(second), step(second)],
    )
    return first


def faults(first: Any) -> None:
    """What goes wrong on one rank is told on both, and leaves the engine as it is."""
    store = Store()
    tag = "faults"

    def told(label: str, error: str, engine: Any, before: str) -> None:
        report(label=label, error=error, untouched=state_of(engine) == before)

    def try_save(label: str, tag: str = tag, **more: Any) -> None:
        before, store.asked = state_of(first), []
        error = error_of(lambda: subcheckpoints.save(first, store.writer, tag=tag, **more))
        told(label, error, first, before)
        report(label=f"{label}: asked", keys=store.asked)

    store.refuse = lambda sub: rank == 1 and sub.role == "optimizer"
    try_save("a writer raises")
    store.keeps_errors = True
    try_save("a writer keeps its error")
    store.keeps_errors = False
    store.refuse = lambda sub: sub.role == "index"
    try_save("the index cannot be written")
    store.refuse = lambda _: False
    try_save("a client state cannot be pickled", client_state={"call": lambda: 0})
    first.save_zero_checkpoint = rank == 0
    try_save("nobody writes an optimizer")
    first.save_zero_checkpoint = True
    try_save("a client state is none", client_state=[1] if rank else {})
    try_save("tags differ", tag=f"rank{rank}")
    decoupled = rank == 1
    own = first.checkpoint_engine
    if decoupled:
        own.is_decoupled = lambda: True
    try_save("one rank is refused")
    if decoupled:
        del own.is_decoupled

    subcheckpoints.save(first, store.writer, tag=tag)
    second = dense(1, 1)
    step(second)

    def try_load(
        label: str, spoil: Callable[[Subcheckpoint, bytes], bytes], tag: str | None = tag
    ) -> None:
        before, store.spoil = state_of(second), spoil
        error = error_of(lambda: subcheckpoints.load(second, store.reader, tag=tag))
        told(label, error, second, before)

    def on_rank_1(role: str, change: Callable[[bytes], bytes]) -> Any:
        return lambda sub, data: change(data) if (rank, sub.role) == (1, role) else data

    def in_index(old: bytes, new: bytes) -> Any:
        def change(data: bytes) -> bytes:
            assert old in data
            return re.sub(rb',"checksum":.*', b"}", data.replace(old, new))

        return change

    def everywhere(change: Callable[[bytes], bytes]) -> Any:
        return lambda sub, data: change(data) if sub.role == "index" else data

    def flip(data: bytes) -> bytes:
        return data[:100] + bytes([data[100] ^ 1]) + data[101:]

    try_load("a bit is flipped", on_rank_1("optimizer", flip))
    try_load("bytes are missing", on_rank_1("model", lambda data: data[:-1]))
    try_load("there are more bytes", on_rank_1("model", lambda data: data + b"."))
    try_load("the index is damaged", on_rank_1("index", flip))
    try_load("there is no index", lambda _, data: data, tag="nowhere")
    try_load("indexes differ", on_rank_1("index", in_index(b'"step":2', b'"step":9')))
    try_load("it is another checkpoint", everywhere(in_index(b'"tag":"faults"', b'"tag":"x"')))
    stage = in_index(b'"zero_stage":1', b'"zero_stage":2')
    try_load("the topology is another", everywhere(stage))
    try_load("ranks have changed places", everywhere(in_index(b'"dp":1', b'"dp":2')))
    escape = in_index(b'"file":"mp_rank', b'"file":"../mp_rank')
    try_load("a name leads elsewhere", everywhere(escape))

    class GoneError(Exception):
        pass

    def lose(sub: Subcheckpoint, data: bytes) -> bytes:
        if (rank, sub.role) == (0, "optimizer"):
            raise GoneError("the object is gone")
        return data

    try_load("a reader raises", lose)
    wider = dense(1, 1, width=WIDTH + 1)
    store.spoil = lambda _, data: data
    error = error_of(lambda: subcheckpoints.load(wider, store.reader, tag=tag))
    report(label="another model", error=error)
    report(label="after all that", at=[step(first), step(first)])


def beside(first: Any) -> None:
    """DeepSpeed's own way works on, and the example of the documents does what it says."""
    first.save_checkpoint(str(folder / "own"), "own")
    second = dense(1, 1)
    second.load_checkpoint(str(folder / "own"), "own")
    text = (Path(__file__).parents[3] / "docs/subcheckpoints.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {"engine": second}
    exec(code.replace('"/pieces"', repr(str(folder / "example"))), names)
    report(
        label="example",
        client_state=names["client_state"],
        losses=[step(first), step(first)],
        resumed=[step(second), step(second)],
    )


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s+(\d+) kB", text)[0]) << 10


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that a call needed at most, beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def memory() -> None:
    """What a save and a load take, beside the size of this rank's part."""
    width = 3000
    first, second = dense(0, 1, width), dense(1, 1, width)
    step(first, width), step(second, width)
    pieces = folder / "large"
    pieces.mkdir(exist_ok=True)

    def opener(mode: str) -> Callable[[Subcheckpoint], IO[bytes]]:
        return lambda sub: (pieces / sub.key).open(mode)

    saving = peak_of(lambda: subcheckpoints.save(first, opener("wb")))
    loading = peak_of(lambda: subcheckpoints.load(second, opener("rb")))
    part = (pieces / f"optimizer-pp0-tp0-dp{rank}").stat().st_size
    report(label="memory", saving=saving / part, loading=loading / part)


def death() -> None:
    """A rank dies while it writes; the other says so, and there is no index."""
    first, store = pipeline(0, 1), Store()

    def die(sub: Subcheckpoint) -> bool:
        if (rank, sub.role) == (1, "optimizer"):
            os._exit(0)
        return False

    store.refuse = die
    error = error_of(lambda: subcheckpoints.save(first, store.writer, tag="death"))
    report(label="death", error=error, asked=store.asked)


one = resumes("zero1", functools.partial(dense, stage=1))
beside(one)
for stage in (0, 3):
    resumes(f"zero{stage}", functools.partial(dense, stage=stage))
os.environ["LOCAL_RANK"] = "0"  # two nodes: on each, DeepSpeed asks for the model to be written
node_local = {"use_node_local_storage": True}
two = resumes("zero2", functools.partial(dense, stage=2, checkpoint=node_local))
assert two.save_non_zero_checkpoint
os.environ["LOCAL_RANK"] = str(rank)
for stage in (0, 1, 3):
    resumes(f"bf16 zero{stage}", functools.partial(dense, stage=stage, bf16=BF16))
os.environ.update(CROSS_SIZE="1", CROSS_RANK="0", LOCAL_SIZE="2")
fast = {"writer": {"type": "python", "decoupled": False, "data_parallel": "replica"}}
resumes("fast zero1", functools.partial(dense, stage=1, checkpoint=fast))
trained = dense(0, 1)
step(trained), step(trained)
faults(trained)
reference = dense(0, 1)
step(reference), step(reference)
report(label="reference", at=[step(reference), step(reference)])
memory()
for stage in (0, 1):
    resumes(f"moe zero{stage}", functools.partial(moe, stage=stage))
for stage in (0, 1):
    resumes(f"pipeline zero{stage}", functools.partial(pipeline, stage=stage))
death()
os._exit(0)
