"""``plait doctor``: gathers the facts, has them judged, prints what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import plait
from plait import _doctor_host, _doctor_torch
from plait._doctor import Finding, Level
from plait._doctor_facts import Backends, Facts, gathered
from plait._doctor_parts import judge
from plait._doctor_self_test import self_test

__all__ = ["gather", "report", "run_doctor"]


def run_doctor(*, as_json: bool) -> int:
    """Look at this machine and say what was found; returns 1 if something fails, otherwise 0."""
    facts = gather()
    findings = judge(facts)
    if as_json:
        told = {"plait": plait.__version__, "findings": [asdict(each) for each in findings]}
        print(json.dumps(told | {"facts": asdict(facts)}, indent=1, default=sorted))
    else:
        print(report(findings))
    return int(any(each.level is Level.FAIL for each in findings))


def gather() -> Facts:
    """Everything that is to be judged; the self-test only where there is a gloo to test."""
    backends = gathered(_doctor_torch.backends)
    can_meet = isinstance(backends, Backends) and "gloo" in backends.available
    return Facts(
        system=gathered(_doctor_host.system),
        cores=gathered(_doctor_host.cores),
        memory=gathered(_doctor_host.memory),
        shared_memory=gathered(_doctor_host.shared_memory),
        disk=gathered(lambda: _doctor_host.disk(Path.cwd())),
        files=gathered(_doctor_host.files),
        libraries=gathered(_doctor_host.libraries),
        devices=gathered(_doctor_torch.devices),
        backends=backends,
        kernels=gathered(_doctor_torch.kernels),
        self_test=gathered(lambda: self_test(os.environ)) if can_meet else None,
    )


def report(findings: Sequence[Finding]) -> str:
    """The findings, group by group, and what they come to."""
    width = max(len(each.what) for each in findings)
    lines = [f"plait {plait.__version__}"]
    for group, members in groupby(findings, key=lambda each: each.group):
        lines += ["", group]
        for each in members:
            remedy = f"  -> {each.remedy}" if each.remedy else ""
            lines.append(f"  {each.level:<4}  {each.what:<{width}}  {each.value}{remedy}")
    return "\n".join([*lines, "", _sum(findings)])


def _sum(findings: Sequence[Finding]) -> str:
    levels = [each.level for each in findings]
    num_fails, num_warns = levels.count(Level.FAIL), levels.count(Level.WARN)
    fails = "nothing fails" if not num_fails else f"{num_fails} fail"
    return f"{fails}, {num_warns} to look at" if num_warns else fails
