"""Trains with a Trainer of TRL, for tests/integration/test_trl.py.

A place of ``--kill`` is a callback's hook, see job_log.py.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made here

import datasets
import trl
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint

from elastic_resume.integrations.transformers import DPOTrainer, KTOTrainer, SFTTrainer
from tests.support.scripts.job_log import JobLog, digest, parse_arguments
from tests.support.scripts.trainer import Averaging, Observer, is_time

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(40))]
SAMPLES, EVALUATION_SAMPLES = 72, 16


def make_tokenizer() -> Any:
    """Make a tokenizer of a few words."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token=WORDS[3]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_model() -> LlamaForCausalLM:
    """Make a language model of a few thousand parameters, with dropout."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), attention_dropout=0.1, **sizes, **tokens))


def text(index: int, step: int) -> str:
    """Count modulo a number, by texts of different lengths."""
    return " ".join(f"w{(index + step * number) % 40}" for number in range(4 + (index * step) % 9))


def make_sft(settings: dict[str, Any]) -> Any:
    """Train on texts."""
    rows = [{"text": text(n, 1 + n % 3)} for n in range(SAMPLES + EVALUATION_SAMPLES)]
    return SFTTrainer(make_model(), trl.SFTConfig(**settings), **divide(rows))


def make_dpo(settings: dict[str, Any]) -> Any:
    """Prefer one of two texts, with LoRA."""
    rows = [
        {"prompt": text(n, 1), "chosen": " " + text(n, 2), "rejected": " " + text(n, 3)}
        for n in range(SAMPLES + EVALUATION_SAMPLES)
    ]
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return DPOTrainer(make_model(), args=trl.DPOConfig(**settings), peft_config=adapter, **divide(rows))


def make_kto(settings: dict[str, Any]) -> Any:
    """Learn which texts are good; the class has a sampler of its own, which is the Trainer's."""
    rows = [
        {"prompt": text(n, 1), "completion": " " + text(n, 2), "label": n % 2 == 0}
        for n in range(SAMPLES + EVALUATION_SAMPLES)
    ]
    return KTOTrainer(make_model(), make_model(), trl.KTOConfig(**settings), **divide(rows))


def divide(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments for both parts of a data set."""
    whole = datasets.Dataset.from_list(rows)
    return {
        "train_dataset": whole.select(range(SAMPLES)),
        "eval_dataset": whole.select(range(SAMPLES, len(rows))),
        "processing_class": make_tokenizer(),
    }


CASES = {"sft": make_sft, "dpo": make_dpo, "kto": make_kto}


def main() -> None:
    """Train one case."""
    args = parse_arguments(CASES)
    log = JobLog(args)
    output = args.records / "output"
    trainer = CASES[args.case](
        {
            "output_dir": str(output),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "logging_steps": 3,
            "seed": 5,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 4,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "bf16": False,
            "gradient_checkpointing": False,
        }
    )
    averaging, observer = Averaging(), Observer(log)
    observer.trainer = trainer
    for callback in (averaging, observer):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
    log.write_end(
        model=digest(trainer.model),
        log=[{k: v for k, v in e.items() if not is_time(k)} for e in trainer.state.log_history],
        tokens=trainer._total_train_tokens,
        averages=[averaging.updates, averaging.by_epoch, averaging.average.tolist()],
        batch=trainer.elastic_global_batch,
    )


if __name__ == "__main__":
    main()
