"""CUDNN_SDPA_TRANSFORMERS=1 registers in each process; without it, PyTorch's import imports nothing of this library."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")

VARIABLE = "CUDNN_SDPA_TRANSFORMERS"
FINDS = """
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
assert "cudnn_sdpa" in AttentionInterface().valid_keys() and "cudnn_sdpa" in AttentionMaskInterface().valid_keys()
if hasattr(masking_utils, "PagedAttentionCache"):
    from transformers.generation.continuous_batching import cache, continuous_api, initialization
    for module in (cache, continuous_api, initialization):
        assert module.is_flash_attention_requested(requested_attention_implementation="cudnn_sdpa"), module
"""


@pytest.fixture
def run(run_python, repository, tmp_path, monkeypatch):
    """Runs Python where the package is installed, as far as PyTorch can tell; folders come first on the path."""
    point = re.search(r'^\[project\.entry-points."torch\.backends"\]\n(.*)$', pyproject(repository), re.MULTILINE)[1]
    metadata = tmp_path / "installed" / "installed_here-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-here\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{point.replace(chr(34), '')}\n")

    def run(code, value, *folders):
        monkeypatch.delenv(VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        first = [str(folder) for folder in (*folders, metadata.parent, repository)]
        return run_python(f"import sys\nsys.path[:0] = {first!r}\n{code}", fresh=True)

    return run


def pyproject(repository):
    return (repository / "pyproject.toml").read_text()


def test_the_wheel_has_the_module_of_the_entry_point(repository):
    assert re.search(
        r'^only-include = \["cudnn_sdpa", "cudnn_sdpa_autoload\.py"\]$', pyproject(repository), re.MULTILINE
    )
    assert (repository / "cudnn_sdpa_autoload.py").is_file()


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_nothing_is_imported_and_nothing_watches(run, value):
    run(
        """
import torch
assert "cudnn_sdpa_autoload" in sys.modules
assert not [name for name in sys.modules if name.split(".")[0] in ("cudnn_sdpa", "transformers")]
assert not [finder for finder in sys.meta_path if "autoload" in type(finder).__module__]
""",
        value,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "imports",
    [
        "import torch, transformers",
        "from transformers import LlamaForCausalLM",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "from transformers import PreTrainedModel\nimport wave",  # which imports PyTorch: some import must follow
        "import torch\nfrom transformers import PreTrainedModel",
        "import transformers.generation.continuous_batching",
        "import transformers.masking_utils",
        "from transformers import Trainer, pipeline",
        "from cudnn_sdpa.integrations.transformers import register\nregister(inspect_padding=False)",
    ],
)
def test_on_models_find_the_attention(run, imports):
    run(imports + FINDS, "1")


def test_on_pytorchs_import_imports_neither(run):
    run("import torch\nassert not {'cudnn_sdpa', 'transformers'} & set(sys.modules)", "1")


def test_a_model_runs_and_a_users_register_wins(run):
    run(
        """
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
model = LlamaForCausalLM._from_config(config, attn_implementation="cudnn_sdpa")
assert model(torch.arange(8)[None]).logits.shape == (1, 8, 64)
from cudnn_sdpa.integrations.transformers import register
before = AttentionInterface()["cudnn_sdpa"]
register(inspect_padding=False)
assert AttentionInterface()["cudnn_sdpa"] is not before
import wave
assert AttentionInterface()["cudnn_sdpa"] is not before
""",
        "1",
    )


WARNS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from transformers import LlamaForCausalLM
(text,) = [str(warning.message) for warning in caught if "CUDNN_SDPA_TRANSFORMERS" in str(warning.message)]
"""


def test_a_broken_installation_warns(run, tmp_path):
    (tmp_path / "broken" / "cudnn_sdpa").mkdir(parents=True)
    (tmp_path / "broken" / "cudnn_sdpa" / "__init__.py").write_text("raise OSError('a library is missing')")
    run(WARNS + "assert 'OSError: a library is missing' in text, text", "1", tmp_path / "broken")


def test_a_wrong_value_warns(run):
    run(WARNS + "assert 'CUDNN_SDPA_TRANSFORMERS=yes' in text and 'may be 1 or 0' in text, text", "yes")


def test_pytorchs_switch_turns_it_off(run, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    run("import torch\nassert 'cudnn_sdpa_autoload' not in sys.modules", "1")


def test_the_module_imports_nothing_that_pytorch_does_not(run_python, repository):
    found = run_python(
        f"""
import sys, torch
sys.path.insert(0, {str(repository)!r})
sys.modules.pop("cudnn_sdpa_autoload", None)
before = set(sys.modules)
import cudnn_sdpa_autoload
print(*set(sys.modules) - before)
"""
    )
    assert found.stdout.split() == ["cudnn_sdpa_autoload"]
