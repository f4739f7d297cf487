"""The real code broken on purpose, one rule at a time: does the simulation see it?

    python -m tests.simulation.mutants [--runs N] [--seed S] [--jobs J] [NAME ...]

Each mutant is a scratch copy of the packages with a few lines changed. It is run until an invariant
breaks; printed are the number of runs that took, and what was seen first. A mutant that survives,
or whose lines are no longer in the code, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORE = "sidecar/ds_ckpt_store"
SIDECAR = "sidecar/ds_ckpt_sidecar"
HOOK = "trainer_hook/ds_ckpt_hook"


@dataclass(frozen=True)
class Mutant:
    """One rule broken.

    Attributes:
        name: what it does wrong.
        file: where.
        old, new: lines, and what they become.
        more: further changes of the same kind.
    """

    name: str
    file: str
    old: str
    new: str
    more: tuple[tuple[str, str, str], ...] = ()


MUTANTS = (
    Mutant(
        "points before the commit",
        f"{SIDECAR}/lifecycle.py",
        "        found = self._catalog.commit(intent)\n",
        "        from ds_ckpt_store.stores.port import BytesSource\n"
        "        self._catalog.store.put('latest', BytesSource(intent.folder.encode()))\n"
        "        found = self._catalog.commit(intent)\n",
    ),
    Mutant(
        "removes local files once they are stored",
        f"{SIDECAR}/lifecycle.py",
        'frozenset({"committed", "cleaned", "abandoned", "superseded"})',
        'frozenset({"stored", "committed", "cleaned", "abandoned", "superseded"})',
    ),
    Mutant(
        "commits with one receipt",
        f"{STORE}/catalog.py",
        "        if missing:\n            return Commit(None, missing_nodes=missing)\n",
        "        if len(missing) == len(intent.nodes):\n"
        "            return Commit(None, missing_nodes=missing)\n",
    ),
    Mutant(
        "commits on a receipt that was put before the upload",
        f"{SIDECAR}/lifecycle.py",
        "        done = self._uploader.upload(\n",
        "        self._catalog.put_receipt(\n"
        "            Receipt(\n"
        "                save_id=save.save_id,\n"
        "                node=manifest.node,\n"
        "                files=[_stored_file(shard, manifest.node) for shard in manifest.shards],\n"
        "                proof='',\n"
        "            )\n"
        "        )\n"
        "        done = self._uploader.upload(\n",
        (
            (
                f"{STORE}/catalog.py",
                "        wrong = tuple("
                "key for key, entry in objects if sizes.get(key) != entry.size)\n",
                "        wrong = ()\n",
            ),
        ),
    ),
    Mutant(
        "cleans up after an ambiguous put",
        f"{STORE}/catalog.py",
        "        except (PreconditionError, AmbiguousError):\n            try:\n",
        "        except (PreconditionError, AmbiguousError) as lost:\n"
        "            if isinstance(lost, AmbiguousError):\n"
        "                self.store.delete(key)\n"
        "            try:\n",
    ),
    Mutant(
        "decides without a condition",
        f"{STORE}/catalog.py",
        "            self._write(key, record, IfAbsent())\n",
        "            self.store.put(key, BytesSource(record.to_bytes()))\n",
    ),
    Mutant(
        "gives all saves of a tag one folder",
        f"{STORE}/contract/manifest.py",
        "        return names.folder_of(self.tag, self.save_id)\n",
        '        return names.folder_of(self.tag, "0" * 12 + "-" + "0" * 16)\n',
    ),
    Mutant(
        "deletes objects before the record",
        f"{STORE}/retention.py",
        '            if self._catalog.replace(record, state="deleted", reason="retention") '
        "is not None:\n",
        "            self._catalog.delete_objects(key for key, _ in record.objects())\n"
        '            if self._catalog.replace(record, state="deleted", reason="retention") '
        "is not None:\n",
    ),
    Mutant(
        "deletes the record instead of marking it",
        f"{STORE}/retention.py",
        '            if self._catalog.replace(record, state="deleted", reason="retention") '
        "is not None:\n",
        "            self._catalog.store.delete(\n"
        '                f".ds_ckpt/checkpoints/{record.save_id}.json"\n'
        "            )\n"
        "            if True:\n",
    ),
    Mutant(
        "gives up checkpoints without pointing first",
        f"{STORE}/retention.py",
        "        self._catalog.point(committed[-1])\n"
        "        pointed = self._catalog.latest()\n"
        "        if pointed is None:\n"
        "            return Retained()\n",
        "        pointed = committed[-1]\n",
    ),
    Mutant(
        "lets a passed attempt give up checkpoints",
        f"{SIDECAR}/syncer.py",
        "        if owner is None or (owner.run_id, owner.epoch) != (self._run_id, lease.epoch):\n"
        "            return\n",
        "",
        (
            (
                f"{SIDECAR}/syncer.py",
                "lease is None or not lease.newest:\n",
                "lease is None:\n",
            ),
            (
                f"{STORE}/retention.py",
                "        if not committed or committed[-1].epoch > lease.epoch:\n",
                "        if not committed:\n",
            ),
        ),
    ),
    Mutant(
        "moves latest by time alone",
        f"{STORE}/catalog.py",
        "named.order >= record.order",
        "named.time_ms >= record.time_ms",
    ),
    Mutant(
        "moves latest whenever it commits",
        f"{STORE}/catalog.py",
        "                if named is not None and named.order >= record.order:\n"
        "                    return False\n",
        "",
    ),
    Mutant(
        "takes a prefix from a live run",
        f"{STORE}/catalog.py",
        "if owner_now.unfinished and silent <= stale_after:",
        "if False:",
    ),
    Mutant(
        "orders attempts by the clock of a machine",
        f"{STORE}/catalog.py",
        " abs(began - other) > _BEGAN_NOISE\n",
        " False\n",
    ),
    Mutant(
        "believes the manifest's checksum",
        f"{STORE}/transfer/shard.py",
        "        if value != self._shard.crc32c:\n",
        "        if False:\n",
    ),
    Mutant(
        "does not read back where nothing else proves",
        f"{STORE}/transfer/proof.py",
        "    if value != checksum:\n",
        "    if False:\n",
    ),
    Mutant(
        "gives restored files their names unverified",
        f"{STORE}/transfer/download.py",
        "    if value == shard.crc32c:\n        return None\n",
        "    return None\n",
    ),
    Mutant(
        "writes the restored latest first",
        f"{STORE}/restore.py",
        "        aside = self._swap_folder()\n",
        '        self._fs.write_atomic(f"{self._volume.path}/latest", self._record.tag.encode())\n'
        "        aside = self._swap_folder()\n",
    ),
    Mutant(
        "lets each node resume from its own newest",
        f"{HOOK}/resume.py",
        "        [offers[rank].held for rank in session.leaders.values()],\n",
        "        [own or offers[0].held],\n",
    ),
    Mutant(
        "cleans while the ranks choose",
        f"{SIDECAR}/syncer.py",
        "            if lock is None:\n                return\n",
        "            pass\n",
    ),
    Mutant(
        "removes what latest names",
        f"{SIDECAR}/lifecycle.py",
        "        if not folder_reused and self._local.is_latest(manifest):\n"
        "            return False\n",
        "",
    ),
    Mutant(
        "removes files without comparing them",
        f"{SIDECAR}/local.py",
        "    return (state.size, state.inode, state.mtime_ns) == "
        "(entry.size, entry.inode, entry.mtime_ns)\n",
        "    return True\n",
    ),
    Mutant(
        "forgets what others have completed",
        f"{SIDECAR}/syncer.py",
        "                self._catalog.commit(intent)\n",
        "                pass\n",
    ),
    Mutant(
        "raises into training",
        f"{HOOK}/saving.py",
        "        if strict:\n            raise (",
        "        if True:\n            raise (",
    ),
    Mutant(
        "publishes though a rank has failed",
        f"{HOOK}/plan.py",
        "    if problems:\n        raise NotPublishedError",
        "    if False:\n        raise NotPublishedError",
    ),
    Mutant(
        "deletes by name before the record says so",
        f"{STORE}/curate.py",
        "        given_up = [self._give_up(",
        "        self._catalog.delete_objects(key for r in wanted for key, _ in r.objects())\n"
        "        given_up = [self._give_up(",
    ),
    Mutant(
        "collects saves without a decision",
        f"{STORE}/collect.py",
        '            record = self._catalog.abandon(intent, f"gc: {reason}")\n'
        '            if record.state != "abandoned":\n'
        "                yield from self._decided(sweep, intent, record)\n"
        "                return\n",
        "",
    ),
    Mutant(
        "collects what is at work",
        f"{STORE}/collect.py",
        "        if alive:\n",
        "        if False:\n",
    ),
)

_LAST = re.compile(r"^runs (\d+), violations (\d+), first failing seed (\S+)$", re.MULTILINE)
_BROKEN = re.compile(r"^BROKEN \S+: (.*)$", re.MULTILINE)


def make(mutant: Mutant, folder: Path) -> None:
    """A scratch copy with the rule broken.

    Raises:
        ValueError: its lines are not there, or not once.
    """
    for name in ("sidecar", "trainer_hook"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/__init__.py", folder / "tests")
    shutil.copytree(ROOT / "tests/simulation", folder / "tests/simulation")
    for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.more):
        path = folder / file
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: its lines are {text.count(old)} times in {file}")
        path.write_text(text.replace(old, new))


def hunt(mutant: Mutant, runs: int, seed: int, jobs: int) -> tuple[int, str]:
    """Run it until it is caught; (runs that took, or 0; what was seen first)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(mutant, folder)
        command = [sys.executable, "-m", "tests.simulation", "--until-broken", "--no-shrink"]
        command += ["--runs", str(runs), "--seed", str(seed), "--jobs", str(jobs)]
        paths = [str(folder / each) for each in ("sidecar", "trainer_hook", "")]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    last = _LAST.search(done.stdout)
    if last is None:
        return 0, f"it did not run: {(done.stderr or done.stdout)[-300:]}"
    if last.group(2) == "0":
        return 0, f"survived {last.group(1)} runs"
    sentence = _BROKEN.search(done.stdout)
    return int(last.group(3).rpartition(".")[2]) + 1, sentence.group(1) if sentence else ""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="part of a mutant's name; default: all")
    parser.add_argument("--runs", type=int, default=1000, help="at most, for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    unknown = [each for each in chosen.names if not any(each in m.name for m in MUTANTS)]
    if unknown:
        parser.error(f"no mutant has such a name: {', '.join(unknown)}")
    survived = []
    for mutant in MUTANTS:
        if chosen.names and not any(each in mutant.name for each in chosen.names):
            continue
        took, seen = hunt(mutant, chosen.runs, chosen.seed, chosen.jobs)
        print(f"{took or '-':>5}  {mutant.name:<52} {seen[:110]}", flush=True)
        if not took:
            survived.append(mutant.name)
    print(f"{len(survived)} survived: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
