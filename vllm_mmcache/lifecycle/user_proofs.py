# SPDX-License-Identifier: Apache-2.0
"""The user's proofs: which components `mmcache prove` has shown to be exact on this machine, in one file of the user's.

The file is $XDG_STATE_HOME/mmcache/proofs.json, by default below ~/.local/state. A proof holds for one ProofScope alone
and never widens; what can't be used is ignored with a line in plain words, and reading never raises, since servers read
it at start. Only the command writes, under a lock and in one step.
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_mmcache import __version__
from vllm_mmcache.base.directories import state_directory
from vllm_mmcache.base.errors import ProofsUnwritable
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.lifecycle import configuration
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS, architecture_of, platform_name

FORMAT = 1
KIND = "mmcache proofs"  # what the file says it is
AGAIN = "run `mmcache prove` again"
_MAX_BYTES = 1 << 22

_WORDS = {
    "vllm": "vLLM {}",
    "platform": "platform {}",
    "runner": "model runner V{}",
    "scheduling": "{} scheduling",
    "torch": "torch {}",
    "mmcache": "mmcache {}",
    "device": "device {}",
    "architecture": "{}",
    "tensor_parallel": "tensor parallel size {}",
    "pipeline_parallel": "pipeline parallel size {}",
    "configuration": "configuration {}",
}


@dataclass(frozen=True)
class ProofScope:
    """All that a proof is tied to. Versions are full ones, such as 0.33.0 and 2.14.0+cu130."""

    vllm: str
    platform: str
    """vLLM's name: cpu, cuda, rocm, xpu."""
    runner: int
    """vLLM's model runner, 1 or 2."""
    scheduling: str
    """sync or async."""
    torch: str
    mmcache: str
    device: str
    """The name of the first device, as vLLM gives it."""
    architecture: str
    """The first of the model's config."""
    tensor_parallel: int
    pipeline_parallel: int
    configuration: str = ""
    """A digest of the rest of the configuration (configuration.py); empty of a proof that holds for any."""

    @classmethod
    def of(cls, vllm_config: Any) -> "ProofScope":
        """The scope of an engine with this VllmConfig in this process. Makes no CUDA context."""
        from vllm.platforms import current_platform

        parallel = vllm_config.parallel_config
        return cls(
            vllm=vllm_version(),
            platform=platform_name(),
            runner=2 if vllm_config.use_v2_model_runner else 1,
            scheduling="async" if vllm_config.scheduler_config.async_scheduling else "sync",
            torch=torch_version(),
            mmcache=__version__,
            device=str(current_platform.get_device_name()),
            architecture=architecture_of(vllm_config) or "unknown architecture",
            tensor_parallel=int(parallel.tensor_parallel_size),
            pipeline_parallel=int(parallel.pipeline_parallel_size),
            configuration=configuration.digest(vllm_config),
        )

    def covers(self, other: "ProofScope") -> bool:
        """Whether a proof of this scope holds for an engine of the other one."""
        return other == (self if self.configuration else replace(self, configuration=other.configuration))

    def words(self, names: Iterable[str] | None = None) -> str:
        """These of its values, or all, in words. ASCII alone: a file may hold codes that a terminal obeys."""
        values = {name: ascii(str(value))[1:-1] for name, value in asdict(self).items()}
        return ", ".join(_WORDS[name].format(values[name]) for name in (names or values))


@dataclass(frozen=True)
class Proof:
    """The components that passed within one ProofScope.

    `when` is in UTC; `how` and `arguments`, vLLM's, are for people to read.
    """

    place: ProofScope
    components: tuple[str, ...]
    when: str
    how: str
    arguments: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What is kept of it in the file, where the components are `rooms`, as in files of earlier states."""
        kept = asdict(self) | {"components": list(self.components), "arguments": list(self.arguments)}
        return {_key_of(name): value for name, value in kept.items()}


def _key_of(name: str) -> str:
    """The key of a Proof's field in the file."""
    return "rooms" if name == "components" else name


def torch_version() -> str:
    """The full version of the installed torch, without importing it."""
    return importlib.metadata.version("torch")


def path() -> Path:
    """The file. Raises: RuntimeError where neither XDG_STATE_HOME nor a home directory is known."""
    return state_directory() / "proofs.json"


def read() -> tuple[list[Proof], list[str]]:
    """The proofs that can be used, oldest first, and a line about each thing that is ignored. Never raises."""
    entries, lines = _entries()
    found = []
    for number, entry in enumerate(entries, 1):
        proof, said = _proof(entry, f"entry {number} of {_shown()}")
        lines += said
        if proof is not None:
            found.append(proof)
    return found, lines


def proven_components(scope: ProofScope, proofs: Sequence[Proof] | None = None) -> frozenset[str]:
    """The components that are proven for this very ProofScope, by these proofs or by the file's. Never raises."""
    proofs = read()[0] if proofs is None else proofs
    return frozenset(component for proof in proofs if proof.place.covers(scope) for component in proof.components)


def why_passed_over(scope: ProofScope, proofs: Sequence[Proof] | None = None) -> list[str]:
    """A line for each proof about the same architecture whose components are not proven here. Never raises."""
    proofs = read()[0] if proofs is None else proofs
    here = proven_components(scope, proofs)
    lines = []
    for proof in proofs:
        components = [component for component in proof.components if component not in here]
        if components and proof.place.architecture == scope.architecture:
            place = (
                proof.place if proof.place.configuration else replace(proof.place, configuration=scope.configuration)
            )
            other = [field.name for field in fields(ProofScope) if _value(place, field) != _value(scope, field)]
            lines.append(
                f"a proof of {', '.join(components)} for {place.words(other)} does not hold for "
                f"{scope.words(other)}: {AGAIN}"
            )
    return list(dict.fromkeys(lines))


def add(
    scope: ProofScope, components: Sequence[str], how: str, arguments: Sequence[str], failed: Sequence[str] = ()
) -> None:
    """Keep that `components` passed for one ProofScope, and take back what was proven for it of those in `failed`.

    Taken back is what covers that scope, and what that scope covers.
    An older entry of the same origin keeps the components that are not named here, as when a start tries those alone
    that were not proven yet. All other entries stay as they are. A file that can't be used is set aside, with .ignored
    after its name.
    Raises: ProofsUnwritable.
    """
    unknown = [component for component in (*components, *failed) if component not in ENGINE_COMPONENTS]
    if unknown:
        raise ValueError(f"no components of the engine: {', '.join(unknown)}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    proof = Proof(
        scope, tuple(component for component in components if component not in failed), now, how, tuple(arguments)
    )
    with _changing() as entries:
        kept = []
        for entry in entries:
            old, _ = _proof(entry, "")
            if old is not None:
                gone = set(failed) if old.place.covers(scope) or scope.covers(old.place) else set()
                if (old.place, old.how, old.arguments) == (proof.place, proof.how, proof.arguments):
                    gone.update(proof.components)
                entry = {**entry, "rooms": [component for component in entry["rooms"] if component not in gone]}
                if not entry["rooms"]:
                    continue
            kept.append(entry)
        entries[:] = [*kept, proof.as_json()] if proof.components else kept


def forget(number: int | None = None) -> int:
    """Remove the proof of this number, as `read` lists them from 1 on, or all, with the file. Returns how many went.

    Raises: ProofsUnwritable; IndexError where there is no such proof.
    """
    if number is None:
        count = len(read()[0])
        try:
            path().unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            raise ProofsUnwritable(f"{_shown()} can't be removed: {error}") from error
        return count
    with _changing() as entries:
        usable = [index for index, entry in enumerate(entries) if _proof(entry, "")[0] is not None]
        if not 1 <= number <= len(usable):
            raise IndexError(number)
        del entries[usable[number - 1]]
    return 1


def remove() -> int:
    """Remove the file of proofs with all that lies beside it for its sake. Returns how many proofs went.

    Without a home directory there is no such file. Raises: ProofsUnwritable.
    """
    try:
        path()
    except RuntimeError:
        return 0
    count = forget()
    try:
        for left in (path().with_name("proofs.lock"), path().with_name("proofs.json.ignored")):
            left.unlink(missing_ok=True)
        with suppress(OSError):  # it holds what is not ours, or is not there
            path().parent.rmdir()
    except OSError as error:
        raise ProofsUnwritable(f"{error.filename} can't be removed: {error.strerror}") from error
    return count


def _value(scope: ProofScope, field: Any) -> Any:
    return getattr(scope, field.name)


def _shown() -> str:
    try:
        return str(path())
    except RuntimeError:
        return "the file of proofs"


def _entries() -> tuple[list[Any], list[str]]:
    """What the file holds, unchecked, and why it is ignored where it is."""
    try:
        path()
    except RuntimeError:  # this user has no home, as in many containers: so no file either
        return [], []
    try:
        content = _content()
    except FileNotFoundError:
        return [], []
    except (OSError, _Foreign) as error:
        return [], [f"{_shown()} is ignored: {_why(error)}"]
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:  # what json raises for what is no JSON, and for endless numbers
        return [], [f"{_shown()} is ignored: it is not JSON ({error}): remove it, and {AGAIN}"]
    if not isinstance(whole, dict) or whole.get("kind") != KIND or not isinstance(whole.get("proofs"), list):
        return [], [f"{_shown()} is ignored: `mmcache prove` has not written it: remove it, and {AGAIN}"]
    if whole.get("format") != FORMAT:
        return [], [
            f"{_shown()} is ignored: it has format {str(whole.get('format'))[:20]!a}, mmcache {__version__} writes "
            f"{FORMAT}: {AGAIN}"
        ]
    return whole["proofs"], []


class _Foreign(Exception):
    """The file is not the user's own; the message says what was seen and what to do."""


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return f"it is a symbolic link: put the file itself there, or remove the link and {AGAIN}"
    return f"{error}" if isinstance(error, _Foreign) else f"it can't be read ({error}): remove it, and {AGAIN}"


def _content() -> bytes:
    """The file's bytes. Raises: OSError; _Foreign where others could have written them."""
    place = path()
    folder = place.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        raise _Foreign(
            f"its folder has mode {stat.filemode(folder.st_mode)} and owner {folder.st_uid}, so others than user "
            f"{os.geteuid()} could have put it there: chmod 700 {place.parent}, and {AGAIN}"
        )
    file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            raise _Foreign(f"it is no file ({stat.filemode(seen.st_mode)}): remove it, and {AGAIN}")
        if seen.st_uid != os.geteuid():
            raise _Foreign(f"it belongs to user {seen.st_uid}, not to {os.geteuid()}: remove it, and {AGAIN}")
        if seen.st_mode & 0o022:
            mode = stat.filemode(seen.st_mode)
            raise _Foreign(f"others may write it ({mode}): look at it, and remove it or chmod 600 {place}")
        if seen.st_size > _MAX_BYTES:
            raise _Foreign(f"it has {seen.st_size} bytes, more than proofs need: remove it, and {AGAIN}")
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def _proof(entry: Any, where: str) -> tuple[Proof | None, list[str]]:
    """The proof that an entry is, if it is one, and what is ignored of it."""
    bad = [f"{where} is ignored: it is not as `mmcache prove` writes it: {AGAIN}"]
    if not isinstance(entry, dict) or set(entry) != {_key_of(field.name) for field in fields(Proof)}:
        return None, bad
    kept, components, arguments = entry["place"], entry["rooms"], entry["arguments"]
    if isinstance(kept, dict):  # files of earlier states have no configuration
        kept = {"configuration": "", **kept}
    types = {field.name: int if field.type in (int, "int") else str for field in fields(ProofScope)}
    if not isinstance(kept, dict) or {name: type(value) for name, value in kept.items()} != types:
        return None, bad
    texts = [entry["when"], entry["how"], *(components if isinstance(components, list) else [None])]
    texts += arguments if isinstance(arguments, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        return None, bad
    lines = []
    unknown = [component for component in components if component not in ENGINE_COMPONENTS]
    if unknown:
        named = ", ".join(ascii(component[:40]) for component in unknown)
        lines.append(f"{where} names what is no component of mmcache {__version__}: {named}, which is ignored")
    known = tuple(component for component in ENGINE_COMPONENTS if component in components)
    if not known:
        return None, lines or bad
    return Proof(ProofScope(**kept), known, entry["when"], entry["how"], tuple(arguments)), lines


@contextmanager
def _changing() -> Iterator[list[Any]]:
    """The entries, to be changed in place, under the lock; written in one step when the block ends without an error.

    Raises: ProofsUnwritable.
    """
    with ExitStack() as opened:
        try:
            place = path()
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.parent.chmod(0o700)
            lock = os.open(place.with_name("proofs.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (OSError, RuntimeError) as error:
            raise ProofsUnwritable(
                f"{_shown()} can't be written: {error}: set XDG_STATE_HOME to a folder of yours"
            ) from error
        entries, ignored = _entries()
        yield entries
        try:
            if ignored:
                os.replace(place, place.with_name("proofs.json.ignored"))
            _write(place, entries)
        except OSError as error:
            raise ProofsUnwritable(f"{place} can't be written: {error}") from error


def _write(place: Path, entries: list[Any]) -> None:
    """In place of what is there, at once."""
    scratch = place.with_name(f"proofs.json.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "w", encoding="utf-8") as opened:
        json.dump({"kind": KIND, "format": FORMAT, "proofs": entries}, opened, indent=1)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(scratch, place)
