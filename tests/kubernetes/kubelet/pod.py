"""One pod, run by the kubelet's own rules.

They are those of KEP-753 and of the kubelet's source (``computePodActions``, ``killContainer``,
``terminationOrdering``), from Kubernetes 1.29 on:

Start
    Init containers one after the other. One with ``restartPolicy: Always`` is a native sidecar:
    the next one starts when its startup probe has passed, and it goes on running. Then all main
    containers.
Restart
    A sidecar always, whatever the pod's policy, until the main containers have ended. A main
    container by the pod's policy; a failed init container unless the policy is Never, which makes
    the pod Failed. The first time at once, then after a delay that doubles.
End
    When each main container has ended for good; or the pod is deleted or evicted. For each running
    container at once: its grace is the pod's, or what deletion or eviction say, at least 1 s;
    preStop eats of it; a sidecar then waits for all main containers and the sidecars after it,
    which eats of it too; what is left, at least 2 s, lies between SIGTERM and SIGKILL.
Result
    Succeeded if each main container ended with 0. Exit codes of sidecars do not count.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.kubernetes.kubelet import spec as specs
from tests.kubernetes.kubelet.handlers import Probe, handle
from tests.kubernetes.kubelet.runtime import Podman, Run
from tests.kubernetes.kubelet.spec import NotEmulated
from tests.kubernetes.kubelet.timeline import Timeline
from tests.kubernetes.kubelet.volumes import Documents, Volumes, environment

LEAST_GRACE = 2  # minimumGracePeriodInSeconds
EVICTION_GRACE = 1  # what a hard eviction leaves
MESSAGE_BYTES = 4096
FALLBACK_BYTES, FALLBACK_LINES = 2048, 80
POLL = 0.03
NO_RESOLVER = "/dev/null"  # what the hosts do not know is then unknown at once

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True)
class Ended:
    """How a run of a container ended.

    Attributes:
        exit_code: of its first process; 128 and a signal's number if that ended it.
        message: the termination message, as the kubelet reads it after the end.
    """

    exit_code: int
    message: str


class Container:
    """One container of a pod over all its restarts.

    Attributes:
        started: its startup probe has passed in this run, or it has none.
        ready: as its readiness probe says, or without one that it runs.
        ends: how its runs have ended, in order.
    """

    def __init__(self, spec: Mapping[str, Any], *, init: bool) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.is_sidecar = init and spec.get("restartPolicy") == "Always"
        self.is_init = init and not self.is_sidecar
        if init and spec.get("restartPolicy", "Always") != "Always":
            raise NotEmulated(f"{self.name}: restartPolicy {spec['restartPolicy']}")
        if not init and "restartPolicy" in spec:
            raise NotEmulated(f"{self.name}: restartPolicy of a main container")
        self.run: Run | None = None
        self.started = False
        self.ready = False
        self.ends: list[Ended] = []
        self.due = 0.0
        self.runs = 0
        self.over = threading.Event()  # probes of this run end
        self.message_file: Path | None = None
        self.stop_signal = int(signal.SIGTERM)

    @property
    def running(self) -> bool:
        """Whether a run of it has begun and not been seen to end."""
        return self.run is not None

    @property
    def last(self) -> Ended:
        """How it ended last."""
        return self.ends[-1]


@dataclass(frozen=True)
class Place:
    """What a pod finds on its node.

    Attributes:
        podman: the runtime.
        folder: of this pod alone, absent.
        netns: name of its network namespace.
        address: in there.
        node_address: of the node.
        hosts: the file that answers for the cluster's DNS.
        services: variables that tell every container of the cluster's services.
        token: of its service account.
        documents: the Secrets and ConfigMaps of its namespace.
        claims: the folder behind each PersistentVolumeClaim.
        backoff: seconds before the second restart of a container; doubles with each.
        changed: called when a container became ready or ceased to be.
    """

    podman: Podman
    folder: Path
    netns: str
    address: str
    node_address: str
    hosts: Path
    services: Mapping[str, str]
    token: str
    documents: Documents
    claims: Mapping[str, Path]
    backoff: float
    changed: Callable[[], None]


@dataclass
class Meta:
    """A pod's metadata, and what a controller adds to its containers' environment."""

    name: str
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    hostname: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))


class Pod:
    """One pod. It begins to run at once, in threads of its own.

    Args:
        meta: its metadata.
        spec: its ``spec``, as rendered.
        place: what it finds on its node.
        timeline: told what happens.

    Raises:
        NotEmulated: the spec asks for what this runner does not do.
        ConfigError: a volume names what is not there.

    Attributes:
        phase: as ``kubectl get pod`` shows it.
        reason: why it has failed, such as Evicted.
        hosts: the file that answers for the cluster's DNS in it.
    """

    def __init__(
        self, meta: Meta, spec: Mapping[str, Any], place: Place, timeline: Timeline
    ) -> None:
        specs.check_pod(spec)
        self.meta, self.name, self.spec = meta, meta.name, spec
        self.address, self.hosts = place.address, place.hosts
        self._place = place
        self.timeline = timeline
        self.grace = int(spec.get("terminationGracePeriodSeconds", 30))
        self._policy = spec.get("restartPolicy", "Always")
        inits = [Container(each, init=True) for each in spec.get("initContainers", [])]
        self._inits = inits
        self._sidecars = [each for each in inits if each.is_sidecar]
        self._mains = [Container(each, init=False) for each in spec["containers"]]
        self.containers = {each.name: each for each in (*inits, *self._mains)}
        self.phase: Phase = "Pending"
        self.reason = ""
        self.gone = threading.Event()
        self.error: BaseException | None = None
        self._initialized = False
        self._told: tuple[int, str] | None = None  # grace and reason of a deletion or eviction
        self._wake = threading.Event()
        self._terminating = False
        self._runs: list[Run] = []
        self.volumes = Volumes(
            spec,
            place.folder / "volumes",
            documents=place.documents,
            claims=place.claims,
            field=self.field,
            token=place.token,
            memory=self._memory(),
        )
        self._note("created", place.address)
        self._worker = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._worker.start()

    # ---- what a test does to it, and asks

    @property
    def ready(self) -> bool:
        """As its Ready condition: sidecars and main containers run, and say that they are ready."""
        counted = (*self._sidecars, *self._mains)
        return self._initialized and all(each.ready for each in counted)

    def delete(self, grace: int | None = None) -> None:
        """``kubectl delete pod``, with ``--grace-period``; returns at once.

        A controller that replaces it, as a Job does, is the test's part.
        """
        self._end(max(1, self.grace if grace is None else grace), "deleted")

    def evict(self, reason: str = "the node was low on ephemeral storage") -> None:
        """What the node does when it runs out of something; returns at once."""
        self.reason = "Evicted"
        self._end(EVICTION_GRACE, f"evicted: {reason}")

    def _end(self, grace: int, reason: str) -> None:
        if self._told is None:
            self._told = grace, reason
        self._wake.set()

    def wait(self, seconds: float = 60) -> Phase:
        """Wait until all its containers have ended for good; its phase."""
        self.until(self.gone.is_set, seconds, "the end of the pod")
        if self.error is not None:
            raise self.error
        return self.phase

    def until(self, done: Callable[[], object], seconds: float = 60, what: str = "") -> None:
        """Wait until ``done`` says so.

        Raises:
            AssertionError: not in time, or the pod has ended; with the timeline and outputs.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if self.error is not None:
                raise self.error
            over = self.gone.is_set() and not done()
            if over or time.monotonic() > deadline:
                why = "the pod has ended" if over else f"waited {seconds:.0f} s in vain"
                raise AssertionError(f"{why}: {what}\n{self.story()}")
            time.sleep(POLL)

    def until_started(self, name: str, seconds: float = 60) -> None:
        """Wait until a container runs and its startup probe has passed."""
        container = self.containers[name]
        self.until(lambda: container.running and container.started, seconds, f"{name} started")

    def heeds(self, name: str) -> bool:
        """Whether a container runs, and its script is so far that it heeds SIGTERM."""
        container = self.containers[name]
        return container.run is not None and container.run.heeds(container.stop_signal)

    def kill(self, name: str) -> None:
        """SIGKILL to a container's first process, as the kernel does that has no memory left."""
        self._note("killed", container=name)
        self._run_of(name).signal(signal.SIGKILL)

    def execute(self, name: str, *command: str, code: int = 0, seconds: float = 60) -> str:
        """Run a command in a container; what it wrote to stdout.

        Raises:
            AssertionError: it took too long, or its exit code is another.
        """
        ran = self._run_of(name).execute(command, seconds)
        assert ran is not None, f"{command}: took more than {seconds} s"
        assert ran.returncode == code, f"{command}: {ran}"
        return ran.stdout

    def _run_of(self, name: str) -> Run:
        run = self.containers[name].run
        assert run is not None, f"{name} does not run\n{self.story()}"
        return run

    def output(self, name: str) -> str:
        """What a container has written, in all its runs."""
        return "".join(
            path.read_text(errors="replace")
            for path in sorted(self._place.folder.glob(f"{self.name}.{name}.*.log"))
        )

    def message(self, name: str) -> str:
        """The termination message as it stands now, or as it stood at the last end, if any."""
        container = self.containers[name]
        if container.running:
            return self._message(container, 0)
        return container.last.message if container.ends else ""

    def story(self) -> str:
        """The timeline, and the end of what each container wrote."""
        parts = [str(self.timeline)]
        for name in self.containers:
            tail = "\n".join(self.output(name).splitlines()[-25:])
            parts.append(f"--- {self.name} {name}:\n{tail}")
        return "\n".join(parts)

    def remove(self) -> None:
        """End everything at once, and leave nothing of it behind."""
        self._end(1, "removed")
        self._terminating = True
        for container in self.containers.values():
            container.over.set()
        for run in list(self._runs):
            run.signal(signal.SIGKILL)
        self._worker.join(30)
        for run in list(self._runs):
            run.remove()
        self.volumes.remove()

    def field(self, path: str) -> str:
        """A field of the pod, as the downward API gives it."""
        for kind, values in (("labels", self.meta.labels), ("annotations", self.meta.annotations)):
            if path == f"metadata.{kind}":
                return "\n".join(f'{key}="{values[key]}"' for key in sorted(values))
            if path.startswith(f"metadata.{kind}['"):
                return values.get(path.split("'")[1], "")
        known = {
            "metadata.name": self.meta.name,
            "metadata.namespace": self.meta.namespace,
            "metadata.uid": self.meta.uid,
            "spec.nodeName": "node-of-tests",
            "spec.serviceAccountName": self.spec.get("serviceAccountName", "default"),
            "status.podIP": self._place.address,
            "status.podIPs": self._place.address,
            "status.hostIP": self._place.node_address,
        }
        if path not in known:
            raise NotEmulated(f"fieldRef {path}")
        return known[path]

    # ---- the pod's worker

    def _note(self, what: str, detail: str = "", *, container: str = "") -> None:
        self.timeline.note(what, detail, pod=self.name, container=container)

    def _memory(self) -> int | None:
        limits = [
            (each.get("resources") or {}).get("limits", {}).get("memory")
            for each in (*self.spec.get("initContainers", []), *self.spec["containers"])
        ]
        return None if None in limits else sum(int(specs.quantity(each)) for each in limits)

    def _work(self) -> None:
        try:
            while self._told is None:
                self._reap()
                if self._over():
                    break
                self._start_due()
                self._wake.wait(POLL)
            self._terminate()
        except BaseException as error:
            self.error = error
            self._note("error", f"{type(error).__name__}: {error}")
        finally:
            self.gone.set()
            self._place.changed()

    def _over(self) -> bool:
        """Whether its work is done, or can no more be: then the sidecars end too."""
        if any(each.is_init and self._has_failed(each) for each in self._inits):
            return True
        return self._initialized and all(self._is_done(each) for each in self._mains)

    def _is_done(self, container: Container) -> bool:
        if container.running or not container.ends:
            return False
        if self._policy == "Never":
            return True
        return self._policy == "OnFailure" and container.last.exit_code == 0

    def _has_failed(self, container: Container) -> bool:
        ended = bool(container.ends) and not container.running
        return ended and container.last.exit_code != 0 and self._policy == "Never"

    def _start_due(self) -> None:
        for container in self._inits:
            done = container.is_init and bool(container.ends) and container.last.exit_code == 0
            if container.is_init and (done or self._initialized):
                continue
            if not container.running:
                self._start_if_due(container)
            if not self._initialized and not (container.is_sidecar and container.started):
                return
        for container in self._mains:
            if not container.running and not self._is_done(container):
                self._start_if_due(container)
        if not self._initialized and all(container.runs for container in self._mains):
            self._initialized = True
            self.phase = "Running"
            self._place.changed()

    def _start_if_due(self, container: Container) -> None:
        if time.monotonic() < container.due or self._told is not None:
            return
        image = self._place.podman.image(container.spec["image"])
        user, _ = specs.security(self.spec, container.spec, image.user)
        container.stop_signal = image.stop_signal
        name = f"{self.name}.{container.name}.{container.runs + 1}"
        log = self._place.folder / f"{name}.message"
        log.touch()
        log.chmod(0o666)
        environ = environment(
            container.spec,
            documents=self._place.documents,
            field=self.field,
            services=self._place.services,
            extra=self.meta.environ,
        )
        path = container.spec.get("terminationMessagePath") or "/dev/termination-log"
        arguments = [
            *("--network", f"ns:/run/netns/{self._place.netns}"),
            *("--hostname", self.meta.hostname or self.name),
            *("--volume", f"{self._place.hosts}:/etc/hosts:ro"),
            *("--volume", f"{NO_RESOLVER}:/etc/resolv.conf:ro"),
            *("--volume", f"{log}:{path}:rw"),
            *user,
            *specs.resources(container.spec),
            *self.volumes.mounts(container.spec),
        ]
        for key, value in environ.items():
            arguments += ["--env", f"{key}={value}"]
        if "workingDir" in container.spec:
            arguments += ["--workdir", container.spec["workingDir"]]
        command = [specs.expand(word, environ) for word in container.spec.get("command", [])]
        words = [specs.expand(word, environ) for word in container.spec.get("args", [])]
        if command:
            arguments += ["--entrypoint", command[0]]
        arguments += [container.spec["image"], *command[1:], *words]
        run = Run(self._place.podman, name, arguments, self._place.folder)
        container.over = threading.Event()
        container.started = container.ready = False
        container.message_file = log
        self._runs.append(run)
        container.run = run
        container.runs += 1
        self._note("running", f"run {container.runs}", container=container.name)
        if container.is_init:
            return
        if "startupProbe" in container.spec:
            self._watch(container, run, "startupProbe")
        else:
            self._started(container, run)

    def _reap(self) -> None:
        """See which runs have ended, read their messages, and plan their restarts."""
        for container in self.containers.values():
            run = container.run
            if run is None or run.running:
                continue
            container.over.set()
            code = run.reap()
            ended = Ended(code, self._message(container, code))
            container.ends.append(ended)
            container.run = None
            container.started = container.ready = False
            again = container.runs - 2  # the first restart comes at once
            delay = min(self._place.backoff * 2**again, 300) if again >= 0 else 0
            container.due = time.monotonic() + delay
            self._note("ended", f"exit code {code}", container=container.name)
            for line in ended.message.splitlines()[:20]:
                self._note("message", line, container=container.name)
            self._place.changed()

    def _message(self, container: Container, code: int) -> str:
        assert container.message_file is not None
        message = container.message_file.read_bytes()[:MESSAGE_BYTES].decode(errors="replace")
        fallback = container.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and code and fallback and container.run is not None:
            lines = container.run.output().splitlines(keepends=True)[-FALLBACK_LINES:]
            message = "".join(lines)[-FALLBACK_BYTES:]
        return message

    # ---- probes

    def _started(self, container: Container, run: Run) -> None:
        """From here on the next container may start, and liveness counts."""
        container.started = True
        self._note("started", container=container.name)
        self._watch(container, run, "livenessProbe")
        if "readinessProbe" in container.spec:
            self._watch(container, run, "readinessProbe")
        else:
            container.ready = True
            self._place.changed()

    def _watch(self, container: Container, run: Run, kind: str) -> None:
        probe = Probe.of(container.spec, kind)
        if probe is None:
            return

        def once(seconds: float) -> str:
            return handle(probe.handler, container.spec, run, self._place.address, seconds)

        def say(well: bool, trouble: str) -> bool:
            return self._probed(container, run, kind, well, trouble)

        threading.Thread(
            target=probe.watch, args=(once, container.over, say), name=kind, daemon=True
        ).start()

    def _probed(self, container: Container, run: Run, kind: str, well: bool, trouble: str) -> bool:
        """A probe has settled; whether to go on probing."""
        if kind == "readinessProbe":
            if container.ready != well:
                container.ready = well
                self._note("ready" if well else "unready", trouble, container=container.name)
                self._place.changed()
            return True
        if well:
            if kind == "startupProbe":
                self._started(container, run)
            return kind == "livenessProbe"
        self._note(f"{kind} failed", trouble, container=container.name)
        if self._terminating:  # noted, for tests; it changes nothing any more
            return True
        given = container.spec[kind].get("terminationGracePeriodSeconds", self.grace)
        self._kill(container, int(given), {})
        return False

    # ---- the end

    def _terminate(self) -> None:
        """As the kubelet's ``killContainersWithSyncResult``, then the phase."""
        self._terminating = True
        grace, reason = self._told or (self.grace, "completed")
        self._note("terminating", f"{reason}, grace {grace} s")
        self._reap()
        running = [each for each in self.containers.values() if each.running]
        gone = {each.name: threading.Event() for each in self.containers.values()}
        for each in self.containers.values():
            if each not in running:
                gone[each.name].set()
        threads = [
            threading.Thread(target=self._kill, args=(each, grace, gone), daemon=True)
            for each in running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in running:
            if each.run is not None:
                each.run.reap()
        self._reap()
        well = self._initialized and all(
            each.ends and each.last.exit_code == 0 for each in self._mains
        )
        self.phase = "Succeeded" if well and not self.reason else "Failed"
        self._note("gone", f"phase {self.phase} {self.reason}".rstrip())

    def _kill(self, container: Container, grace: int, gone: Mapping[str, threading.Event]) -> None:
        """As the kubelet's ``killContainer``; seconds are whole ones, cut off as there.

        Args:
            container: that is to end.
            grace: seconds that it has.
            gone: which containers have ended; empty if no order is kept.
        """
        run = container.run
        if run is None:
            return
        try:
            hook = (container.spec.get("lifecycle") or {}).get("preStop")
            if hook and grace > 0:
                grace -= self._pre_stop(container, run, hook, grace)
            if gone and container.is_sidecar and grace > 0:
                later = self._sidecars[self._sidecars.index(container) + 1 :]
                grace -= self._wait_for([*self._mains, *later], gone, grace)
            grace = max(grace, LEAST_GRACE)
            name = signal.Signals(container.stop_signal).name
            self._note(name, f"{grace} s of grace", container=container.name)
            run.signal(container.stop_signal)
            if not run.wait(grace):
                self._note("SIGKILL", container=container.name)
                run.signal(signal.SIGKILL)
                run.wait(30)
        finally:
            if container.name in gone:
                gone[container.name].set()

    def _pre_stop(self, container: Container, run: Run, hook: Mapping[str, Any], grace: int) -> int:
        """Run the hook; whole seconds that it took."""
        began = time.monotonic()
        self._note("preStop", container=container.name)
        trouble: list[str] = []
        # Beyond the grace it is not waited for; nor is it stopped before the container is.
        thread = threading.Thread(
            target=lambda: trouble.append(
                handle(hook, container.spec, run, self._place.address, grace)
            ),
            daemon=True,
        )
        thread.start()
        thread.join(grace)
        if thread.is_alive() or any(trouble):
            detail = "".join(trouble) or "timed out"
            self._note("preStop failed", detail, container=container.name)
        return int(time.monotonic() - began)

    @staticmethod
    def _wait_for(
        others: Sequence[Container], gone: Mapping[str, threading.Event], grace: int
    ) -> int:
        """Wait for other containers, as long as there is grace; whole seconds that it took."""
        began = time.monotonic()
        for other in others:
            gone[other.name].wait(max(0.0, grace - (time.monotonic() - began)))
        return int(time.monotonic() - began)
