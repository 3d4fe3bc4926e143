"""CUDNN_SDPA_TRANSFORMERS=1 registers in each process; without it, PyTorch's import imports nothing of this library."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers.utils.import_utils import is_accelerate_available, is_serve_available

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
def installed(repository, tmp_path):
    """A folder that tells PyTorch that the package is installed."""
    point = re.search(r'^\[project\.entry-points."torch\.backends"\]\n(.*)$', pyproject(repository), re.MULTILINE)[1]
    metadata = tmp_path / "installed" / "installed_here-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-here\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{point.replace(chr(34), '')}\n")
    return metadata.parent


@pytest.fixture
def run(run_python, repository, installed, monkeypatch):
    """Runs Python where the package is installed; folders come first on the path."""

    def run(code, value, *folders):
        monkeypatch.delenv(VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        first = [str(folder) for folder in (*folders, installed, repository)]
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


@pytest.mark.sample(1)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from transformers.cli.serving.model_manager import ModelManager\nimport wave",
        "import transformers.modeling_utils, wave\nfrom transformers.cli.serving.model_manager import ModelManager",
    ],
)
def test_a_server_takes_the_name_and_no_wrong_one(run, imports):
    run(
        f"""
{imports}
assert ModelManager(attn_implementation="cudnn_sdpa").attn_implementation == "cudnn_sdpa"
for wrong in (dict(attn_implementation="cudnn"), dict(attn_implementation="cudnn_sdpa", quantization="cudnn")):
    try:
        ModelManager(**wrong)
    except ValueError as error:
        assert "Unsupported" in str(error) and "'cudnn'" in str(error), error
    else:
        raise AssertionError(wrong)
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


@pytest.mark.slow
def test_a_broken_installation_warns(run, tmp_path):
    (tmp_path / "broken" / "cudnn_sdpa").mkdir(parents=True)
    (tmp_path / "broken" / "cudnn_sdpa" / "__init__.py").write_text("raise OSError('a library is missing')")
    run(WARNS + "assert 'OSError: a library is missing' in text, text", "1", tmp_path / "broken")


@pytest.mark.slow
def test_a_wrong_value_warns(run):
    run(WARNS + "assert 'CUDNN_SDPA_TRANSFORMERS=yes' in text and 'may be 1 or 0' in text, text", "yes")


@pytest.mark.slow
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


needs_server = pytest.mark.skipif(
    not (is_serve_available() and is_accelerate_available()),
    reason="`transformers serve` lacks packages; `make test-recipes` runs this",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model and its tokenizer, whose words are w3 to w95."""
    from hf_models import DECODERS, tiny
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 96)}}
    whole = Tokenizer(models.WordLevel(words, "<pad>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, **names)
    tokenizer.save_pretrained(folder)
    tiny(DECODERS["qwen3"], "eager").save_pretrained(folder)
    return folder


def completions(address, model, prompts):
    """What a server completes prompts with, requested all at once."""

    def request(prompt):
        body = json.dumps({"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        call = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(call, timeout=100))["choices"][0]["text"]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(request, prompts))


@needs_server
@pytest.mark.parametrize("batching", [[], ["--continuous-batching"]], ids=["alone", "continuous batching"])
def test_transformers_serve_generates_the_tokens_of_eager_attention(batching, saved, installed, repository, tmp_path):
    from transformers import AutoModelForCausalLM

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    path = [str(repository), str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = ["-m", "transformers.cli.transformers", "serve", saved, "--attn-implementation", "cudnn_sdpa"]
    address, log = f"http://localhost:{port}", tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, *command, "--device", "cpu", "--port", port, *batching],
            env={**os.environ, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(server, f"{address}/health", log)
        prompts = [torch.randint(3, 96, (length,)).tolist() for length in (5, 17, 3, 40)]
        found = completions(address, saved, [words_of(prompt) for prompt in prompts])
    finally:
        server.terminate()
        server.wait(60)
    eager = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager")
    whole = [
        eager.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist() for prompt in prompts
    ]
    assert found == [words_of(row[len(prompt) :]) for row, prompt in zip(whole, prompts, strict=True)], log.read_text()


def wait_for(server, address, log):
    for _ in range(200):
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(address, timeout=5)
            return
        time.sleep(0.5)
    raise TimeoutError(log.read_text())


def words_of(tokens):
    """The text of tokens; those that no text has are special."""
    return " ".join(f"w{token}" for token in tokens if token > 2)
