"""Loops of other libraries: the Trainer of transformers, with what PEFT puts into a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import delta

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore", "error:the budget of:RuntimeWarning"),  # theirs are their own affair
]
WORDS, STEPS = 64, 12


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def adapted() -> Any:
    """Adapters on frozen layers."""
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(gpt2(), adapters)


def sequences() -> list[dict[str, Tensor]]:
    of = random.Random(0)
    rows = [torch.tensor([of.randrange(WORDS) for _ in range(of.randint(24, 48))]) for _ in range(2 * 4 * STEPS)]
    return [{"input_ids": row} for row in rows]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As long as the longest one."""
    found = [row["input_ids"] for row in rows]
    most = max(map(len, found))
    ids = torch.stack([row if len(row) == most else F.pad(row, (0, most - len(row)), value=-1) for row in found])
    return {
        "input_ids": ids.clamp(min=0),
        "attention_mask": ids.ge(0).long(),
        "labels": ids.masked_fill(ids.lt(0), -100),
    }


def trained(make: Callable[[], Any], to: Path, **more: Any) -> list[Tensor]:
    """Losses, norms of gradients, what was trained, and the state of the generator."""
    transformers.set_seed(0)
    model = make()
    arguments = transformers.TrainingArguments(
        output_dir=str(to),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=sequences(), data_collator=collate)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    told = [[entry[key] for entry in trainer.state.log_history if key in entry] for key in ("loss", "grad_norm")]
    return [torch.tensor(told), torch.get_rng_state(), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize(("policy", "limit"), [("delta", "40%"), ("recompute", "60%"), ("mimose", "60%")])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (gpt2, {"gradient_accumulation_steps": 2}),
        (gpt2, {"bf16": True, "label_smoothing_factor": 0.1}),
        (adapted, {"max_grad_norm": 0.5}),
    ],
    ids=["accumulated", "bfloat16", "adapters"],
)
def test_the_trainer_of_transformers(
    make: Callable[[], Any], more: dict[str, Any], policy: str, limit: str, followed: list[bool], tmp_path: Path
) -> None:
    plain = trained(make, tmp_path, **more)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 256})
    with delta.evict(activations=limit, policy=chosen, device="cpu") as run:
        evicted = trained(make, tmp_path, **more)
    assert all(map(torch.equal, plain, evicted))
    assert run.report().evictions
    assert sum(followed[-6:]) >= 4, "steps of each length are known by now, or of nearly each"
