"""GluonTS: DeepAR, whose estimator makes a Lightning Trainer of its own, on a stream of windows.

Needs: gluonts lightning
Steps: 60
Remark: Its windows are random, and begin anew after a resume. It ends with the consensus, not GluonTS' best checkpoint
"""

import sys

import lightning
import numpy as np
import pandas as pd
import torch
from gluonts.dataset.pandas import PandasDataset
from gluonts.evaluation import Evaluator, make_evaluation_predictions
from gluonts.torch import DeepAREstimator

from lsgd.integrations.lightning import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
lightning.seed_everything(0)
rng = np.random.default_rng(0)
times = pd.date_range("2020-01-01", periods=120, freq="D")
series = {
    str(number): pd.DataFrame(
        {"target": 5 + np.sin(2 * np.pi * (np.arange(120) + number) / 7) + 0.1 * rng.normal(size=120)}, index=times
    )
    for number in range(20)
}
train = PandasDataset({name: frame[:-7] for name, frame in series.items()})
lsgd = LsgdCallback(shard=False)  # lsgd
estimator = DeepAREstimator(
    freq="D",
    prediction_length=7,
    context_length=21,
    hidden_size=16,
    num_layers=1,
    lr=1e-2,
    batch_size=16,
    num_batches_per_epoch=10,
    trainer_kwargs={
        "max_steps": STEPS,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "logger": False,
        "callbacks": [lsgd],  # lsgd
    },
)
trained = estimator.train_model(train)
predictor = trained.predictor
consensus = trained.trainer.lightning_module.state_dict()  # lsgd
predictor.prediction_net.load_state_dict(consensus)  # lsgd
if lsgd.first:  # lsgd
    torch.save(predictor.prediction_net.state_dict(), "deepar.pt")
    torch.manual_seed(0)
    forecasts, truth = make_evaluation_predictions(PandasDataset(series), predictor=predictor, num_samples=50)
    found, _ = Evaluator(num_workers=0)(truth, forecasts)
    print(f"held-out loss: {found['mean_wQuantileLoss']:.4f}")
