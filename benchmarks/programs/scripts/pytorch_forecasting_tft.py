"""pytorch-forecasting: a Temporal Fusion Transformer on generated series, by Lightning.

Needs: pytorch-forecasting lightning
Steps: 40
"""

import sys

import lightning
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from lsgd.integrations.lightning import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
lightning.seed_everything(0)
rng = np.random.default_rng(0)
frames = []
for series in range(12):
    t = np.arange(80)
    value = 2 + np.sin(2 * np.pi * (t + 3 * series) / 12) + 0.02 * t + 0.1 * rng.normal(size=len(t))
    frames.append(pd.DataFrame({"time": t, "series": str(series), "value": value.astype("float32")}))
data = pd.concat(frames, ignore_index=True)
training = TimeSeriesDataSet(
    data[data.time < 68],
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=24,
    max_prediction_length=6,
    static_categoricals=["series"],
    time_varying_known_reals=["time"],
    time_varying_unknown_reals=["value"],
)
validation = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=68)
model = TemporalFusionTransformer.from_dataset(
    training, learning_rate=1e-2, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, loss=QuantileLoss()
)
lsgd = LsgdCallback()  # lsgd
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=STEPS,
    gradient_clip_val=0.1,
    enable_progress_bar=False,
    logger=False,
    enable_checkpointing=False,
    callbacks=[lsgd],  # lsgd
)
loader = training.to_dataloader(train=True, batch_size=32, num_workers=0)
held_out = validation.to_dataloader(train=False, batch_size=128, num_workers=0)
trainer.fit(model, loader, held_out)
if lsgd.first:  # lsgd
    trainer.save_checkpoint("tft.ckpt")
(found,) = trainer.validate(model, held_out, verbose=False)
print(f"held-out loss: {found['val_loss']:.4f}")
