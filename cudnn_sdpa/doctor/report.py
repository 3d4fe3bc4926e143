"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from cudnn_sdpa._version import __version__
from cudnn_sdpa.doctor.checks import Finding, Level, is_well
from cudnn_sdpa.doctor.facts import Facts
from cudnn_sdpa.graph.backend import version_string


def as_json(facts: Facts, findings: list[Finding]) -> str:
    report = {
        "cudnn_sdpa": __version__,
        "ok": is_well(findings),
        "findings": [asdict(each) for each in findings],
        "facts": facts.to_dict(),
    }
    return json.dumps(report, indent=1)


def as_text(facts: Facts, findings: list[Finding]) -> str:
    lines = [f"{name:<14}{value}" for name, value in _summary(facts)]
    for finding in findings:
        lines += ["", f"{finding.level.value}: {finding.title}", f"  {finding.found}", f"  cure: {finding.cure}"]
    errors = sum(finding.level is Level.ERROR for finding in findings)
    last = "No problems found." if errors == 0 else f"{errors} problem{'s' * (errors > 1)} found."
    return "\n".join([*lines, "", last])


def _summary(facts: Facts) -> Iterator[tuple[str, str]]:
    torch, cudnn, trial = facts.torch, facts.cudnn, facts.trial
    yield "cudnn_sdpa", f"{__version__}, Python {facts.python}"
    if torch is not None:
        its_cudnn = f", cuDNN {version_string(torch.cudnn)}" if torch.cudnn else ""
        yield "PyTorch", f"{torch.version}, CUDA {torch.cuda or 'none'}{its_cudnn}"
    if cudnn is not None:
        yield "cuDNN", version_string(cudnn.version) if cudnn.version else "none"
        yield "frontend", cudnn.frontend or "none"
    for path in facts.mapped:
        yield "loaded", path
    yield "driver", facts.driver or "no kernel module"
    for gpu in torch.gpus if torch else ():
        yield "GPU", f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if trial is not None and not trial.error:
        how = "planned for another machine" if trial.difference is None else f"relative error {trial.difference:.1e}"
        yield "a call", f"{trial.engine}, {how}"
    yield "C compiler", facts.c_compiler or "none"
    yield "calls", facts.native
    yield "plan store", facts.store.folder or "none"
    for name, value in facts.environment.items():
        yield "environment", f"{name}={value}"
