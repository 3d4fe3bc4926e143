"""All checks, and their report as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cudnn_sdpa._version import __version__
from cudnn_sdpa.doctor import libraries, machine
from cudnn_sdpa.doctor.facts import Facts
from cudnn_sdpa.doctor.findings import Check, Finding, Level
from cudnn_sdpa.runtime.backend import version_string

#: In the order in which one thing is the cause of another.
CHECKS: tuple[Check, ...] = (
    *(machine.platform, libraries.broken_off, libraries.torch_version, machine.build, machine.driver, machine.gpus),
    *(libraries.cuda_mix, libraries.frontend, libraries.cudnn, libraries.one_cudnn, libraries.torchs_cudnn),
    *(libraries.two_runtimes, libraries.places, libraries.trial, machine.compilers, machine.store),
)


def examine(facts: Facts) -> list[Finding]:
    """What every check finds, the worst first."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def is_well(findings: list[Finding]) -> bool:
    """Whether nothing fails; warnings and notes do not count."""
    return all(finding.level is not Level.ERROR for finding in findings)


def as_json(facts: Facts, findings: list[Finding]) -> str:
    """Everything, for programs."""
    of = {"cudnn_sdpa": __version__, "ok": is_well(findings), "findings": [each.to_dict() for each in findings]}
    return json.dumps({**of, "facts": facts.to_dict()}, indent=1)


def as_text(facts: Facts, findings: list[Finding]) -> str:
    """Everything, for people."""
    lines = [f"{name:<14}{value}" for name, value in _summary(facts)]
    for finding in findings:
        lines += ["", f"{finding.level.value}: {finding.title}", f"  {finding.found}", f"  cure: {finding.cure}"]
    errors = sum(finding.level is Level.ERROR for finding in findings)
    last = "Nothing is wrong." if errors == 0 else f"{errors} thing{'s are' if errors > 1 else ' is'} wrong."
    return "\n".join([*lines, "", last])


def _summary(facts: Facts) -> Iterator[tuple[str, str]]:
    torch, cudnn, driver, trial = facts.torch, facts.cudnn, facts.driver, facts.trial
    yield "cudnn_sdpa", f"{__version__}, Python {facts.python}"
    if torch is not None:
        theirs = f", cuDNN {version_string(torch.cudnn)}" if torch.cudnn else ""
        yield "PyTorch", f"{torch.version}, CUDA {torch.cuda or 'none'}{theirs}"
    if cudnn is not None:
        yield "cuDNN", version_string(cudnn.version) if cudnn.version else "none"
        yield "frontend", cudnn.frontend or "none"
    for path in facts.mapped:
        yield "loaded", path
    for library in facts.libraries:
        if (library.file or library.path) not in facts.mapped:
            yield "not loaded", f"{library.path} ({library.origin})"
    serves = f", for CUDA up to {driver.cuda // 1000}.{driver.cuda % 1000 // 10}" if driver.cuda else ""
    yield "driver", (driver.release or "of unknown release") + serves if driver.loads else "none"
    for gpu in torch.gpus if torch else ():
        yield "GPU", f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if trial is not None and not trial.error:
        how = "planned for another machine" if trial.difference is None else f"relative error {trial.difference:.1e}"
        yield "a call", f"{trial.engine}, {how}"
    yield "compilers", f"C {facts.c_compiler or 'none'}, C++ {facts.cxx_compiler or 'none'}"
    yield "plan store", facts.store.folder or "none"
    for name, value in facts.environment.items():
        yield "environment", f"{name}={value}"
