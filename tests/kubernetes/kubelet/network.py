"""The network of one node: a bridge, and for each pod a network namespace with an address.

So every pod has ports of its own, is reached from the node at its address (as probes are made),
and reaches the node at the bridge's. Nothing leaves the machine: there is no route beyond it.
"""

from __future__ import annotations

import ipaddress
import random
import subprocess
from collections.abc import Iterator


def _ip(*commands: str) -> None:
    """Run commands of iproute2, in one go."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


class Network:
    """Exists from ``__enter__`` to ``__exit__``.

    Attributes:
        name: of the bridge, and the beginning of the names of all else.
        address: of the node, as pods see it.
    """

    def __init__(self) -> None:
        rng = random.SystemRandom()
        self.name = f"kl{rng.randrange(16**6):06x}"
        self._rng = rng
        self._attached: list[str] = []
        self._hosts: Iterator[ipaddress.IPv4Address] = iter(())
        self.address = ""

    def __enter__(self) -> Network:
        taken = subprocess.run(
            ["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True
        ).stdout
        while True:  # the range that is set apart for tests of networks
            net = ipaddress.IPv4Network(f"198.18.{self._rng.randrange(256)}.0/24")
            if f" {str(net)[:-4]}" not in taken:
                break
        self._hosts = net.hosts()
        self.address = str(next(self._hosts))
        _ip(
            f"link add {self.name} type bridge",
            f"address add {self.address}/24 dev {self.name}",
            f"link set {self.name} up",
        )
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._attached):
            self.detach(name)
        _ip(f"link del {self.name}")

    def attach(self) -> tuple[str, str]:
        """A new namespace: its name, which lies under ``/run/netns``, and its address."""
        address = str(next(self._hosts))
        name = outside = f"{self.name}-{address.split('.')[-1]}"
        inside = "eth0"
        _ip(f"netns add {name}")
        self._attached.append(name)
        _ip(
            f"link add {outside} type veth peer name {inside} netns {name}",
            f"link set {outside} master {self.name} up",
        )
        script = [
            "link set lo up",
            f"address add {address}/24 dev {inside}",
            f"link set {inside} up",
            f"route add default via {self.address}",
        ]
        subprocess.run(
            ["ip", "-netns", name, "-batch", "-"], input="\n".join(script), text=True, check=True
        )
        return name, address

    def detach(self, name: str) -> None:
        """Remove a namespace, and its end of the bridge with it."""
        if name in self._attached:
            self._attached.remove(name)
            _ip(f"netns del {name}")
