"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from cudnn_sdpa._version import __version__
from cudnn_sdpa.doctor.checks import Finding, Level, is_well
from cudnn_sdpa.doctor.probe import Facts
from cudnn_sdpa.graph.backend import version_string


def as_json(facts: Facts, findings: list[Finding]) -> str:
    report = {
        "cudnn_sdpa": __version__,
        "ok": is_well(findings),
        "findings": [asdict(each) for each in findings],
        "facts": asdict(facts),
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
    yield "cudnn_sdpa", f"{__version__}, Python {facts.python}"
    its_cudnn = f", cuDNN {version_string(facts.torch_cudnn)}" if facts.torch_cudnn else ""
    yield "PyTorch", f"{facts.torch}, CUDA {facts.cuda or 'none'}{its_cudnn}"
    yield "cuDNN", version_string(facts.cudnn) if facts.cudnn else "none"
    yield "frontend", facts.frontend or "none"
    for path in facts.mapped:
        yield "loaded", path
    yield "driver", facts.driver or "no kernel module"
    for gpu in facts.gpus or ("none found; CPU tensors run the reference",):
        yield "GPU", str(gpu)
    if facts.engine:
        how = f"relative error {facts.difference}" if facts.difference else "planned for another machine"
        yield "a call", f"{facts.engine}, {how}"
    yield "calls", facts.native
    yield "plan store", facts.plan_store or "none"
    for name, value in facts.environment.items():
        yield "environment", f"{name}={value}"
