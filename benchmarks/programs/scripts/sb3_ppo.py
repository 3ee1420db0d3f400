"""stable-baselines3: PPO in CartPole, with a callback; its policy and optimizer join as they are.

Needs: stable-baselines3 gymnasium
Steps: 320
Figure: mean return
Remark: Ten evaluation episodes; more is better
"""

import sys

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

import lsgd  # lsgd

STEPS, EPOCHS, ROLLOUT, BATCH = int(sys.argv[1]), 4, 256, 64
PER_ROLLOUT = EPOCHS * ROLLOUT // BATCH
agent = PPO("MlpPolicy", "CartPole-v1", n_steps=ROLLOUT, batch_size=BATCH, n_epochs=EPOCHS, seed=0, device="cpu")
worker = lsgd.wrap(agent.policy, agent.policy.optimizer, steps=STEPS)  # lsgd


class EndsWithRun(BaseCallback):  # lsgd
    def _on_step(self):  # lsgd
        return not worker.stopped  # lsgd


left = STEPS - worker.step  # lsgd: left = STEPS
agent.learn(
    ROLLOUT * (left // PER_ROLLOUT),
    callback=EndsWithRun(),  # lsgd
)
worker.finish()  # lsgd
if worker.first:  # lsgd
    agent.save("agent")
    print(f"mean return: {evaluate_policy(agent, agent.get_env(), 10)[0]:.1f}")
