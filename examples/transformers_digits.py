"""Handwritten digits by Hugging Face's Trainer, losing nothing when a worker or a node dies.

python transformers_digits.py
torchrun --nproc-per-node 3 transformers_digits.py
elastic-resume run --nproc-per-node 3 --preload transformers.trainer transformers_digits.py

Without elastic_resume: delete its import and DigitsTrainer, and make a Trainer.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from transformers.trainer_utils import EvalPrediction

from elastic_resume.integrations.transformers import ElasticTrainer


class DigitsTrainer(ElasticTrainer, Trainer):
    elastic_global_batch = 96


def digits() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """1,437 digits to train on and 360 to test on: grey images of 8 x 8, scaled to [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    samples = [
        {"pixel_values": image, "labels": torch.tensor(int(label))}
        for image, label in zip(pixels, labels, strict=True)
    ]
    train, test = train_test_split(samples, test_size=360, random_state=0, stratify=labels)
    return train, test


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output-dir", default="transformers_digits")
    options = parser.parse_args()
    set_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    )
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = DigitsTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
    )
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"test accuracy {result['eval_accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    main()
