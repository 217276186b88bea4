"""Two network namespaces of this machine, joined by one link whose rate can be set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NAMESPACES = ("plait-bench-0", "plait-bench-1")
DEVICES = ("plait0", "plait1")  # of the link, one in each namespace
ADDRESSES = ("10.213.7.1", "10.213.7.2")
BURST = "128kb"  # above one segment of 64 KB, which is dropped otherwise


def why_not() -> str | None:
    """Why this machine cannot have the namespaces, or None."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}; install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    name = "plait-bench-probe"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"ip netns add: {done.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@contextmanager
def link() -> Iterator[None]:
    """Make both namespaces and the link between them; remove them at the end."""
    _remove()
    try:
        for name in NAMESPACES:
            _run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", DEVICES[1], "netns", NAMESPACES[1])
        _run("ip", "link", "add", DEVICES[0], "netns", NAMESPACES[0], *ends)
        for node, address in enumerate(ADDRESSES):
            _inside(node, "ip", "addr", "add", f"{address}/24", "dev", DEVICES[node])
            for device in (DEVICES[node], "lo"):
                _inside(node, "ip", "link", "set", device, "up")
        yield
    finally:
        _remove()


def set_rate(mbit_s: int | None) -> None:
    """Let so many million bits a second pass each way; None: as many as go."""
    for node, device in enumerate(DEVICES):
        qdisc = ["tc", "qdisc"]
        has_one = "tbf" in _inside(node, *qdisc, "show", "dev", device)
        if mbit_s is not None:
            shape = ["tbf", "rate", f"{mbit_s}mbit", "burst", BURST, "latency", "200ms"]
            _inside(node, *qdisc, "replace", "dev", device, "root", *shape)
        elif has_one:
            _inside(node, *qdisc, "del", "dev", device, "root")


def sent_bytes(node: int) -> int:
    """Bytes that have left a node over the link, with all headers."""
    path = f"/sys/class/net/{DEVICES[node]}/statistics/tx_bytes"
    return int(_inside(node, "cat", path))


def command_inside(node: int, command: Sequence[str]) -> list[str]:
    """A command, to be run in the namespace of a node."""
    return ["ip", "netns", "exec", NAMESPACES[node], *command]


def _remove() -> None:
    for name in NAMESPACES:
        command = ["ip", "netns", "del", name]  # with its end of the link
        subprocess.run(command, capture_output=True, check=False)


def _inside(node: int, *command: str) -> str:
    return _run(*command_inside(node, command))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
