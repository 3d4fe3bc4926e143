"""The recipes of docs/transformers.md for Trainer, PEFT and TRL: they train on this attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from cudnn_sdpa.integrations import attention
from cudnn_sdpa.integrations.transformers import register

DOCUMENTS = [{"input_ids": torch.randint(3, 128, (n,)).tolist()} for n in (9, 12, 5, 16, 7, 10, 11, 6)]
#: What trainers are given here and not on the page.
SMALL = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def calls(monkeypatch):
    """The functions that attention called, each once."""
    register()
    found = set()
    for name in ("sdpa", "sdpa_varlen"):
        function = getattr(attention, name)

        def seen(*args, name=name, function=function, **options):
            found.add(name)
            return function(*args, **options)

        monkeypatch.setattr(attention, name, seen)
    return found


def model(implementation="cudnn_sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def loss_of(trainer):
    trainer.train()
    return trainer.state.log_history[-1]["train_loss"]


def labeled():
    return [{**document, "labels": document["input_ids"]} for document in DOCUMENTS]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("packing", ["positions and a cache", "offsets"])
def test_trainer_with_flattened_documents(packing, calls, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    if packing == "offsets":
        collator, options = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True), {}
    else:
        collator, options = DataCollatorWithFlattening(), {"use_cache": True}
    losses = []
    for implementation in ("cudnn_sdpa", "sdpa"):
        given = options if implementation == "cudnn_sdpa" else {}
        train = TrainingArguments(tmp_path, bf16=True, **SMALL, **given)
        by_positions = collator if implementation == "cudnn_sdpa" else DataCollatorWithFlattening()
        trainer = Trainer(model(implementation), train, train_dataset=labeled(), data_collator=by_positions)
        losses.append(loss_of(trainer))
    assert calls == {"sdpa_varlen"}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.filterwarnings("default")
def test_peft_trains_its_adapters_alone(calls, tmp_path):
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    data = [{name: torch.tensor(ids[:5]) for name, ids in document.items()} for document in labeled()]
    losses = []
    for implementation in ("sdpa", "cudnn_sdpa"):
        whole = model(implementation).bfloat16()
        adapted = peft.get_peft_model(whole, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
        trainer = Trainer(adapted, TrainingArguments(tmp_path, bf16=True, **SMALL), train_dataset=data)
        losses.append(loss_of(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert calls == {"sdpa"}
    changed = {name for name, parameter in adapted.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("packing", [True, False])
def test_trl_fine_tunes(packing, calls, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), **names)
    losses = []
    for implementation in ("cudnn_sdpa", "sdpa"):
        options = {"packing": True, "max_length": 32} if packing else {}
        train = trl.SFTConfig(tmp_path, bf16=True, activation_checkpointing=False, **SMALL, **options)
        data = datasets.Dataset.from_list(DOCUMENTS)
        trainer = trl.SFTTrainer(model(implementation), train, train_dataset=data, processing_class=tokenizer)
        losses.append(loss_of(trainer))
    assert calls  # packed documents are separated by a mask: TRL passes use_cache=False
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
