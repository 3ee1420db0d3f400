"""A flat PPO loop like CleanRL's: several environments, its own rollouts and minibatches, an annealed rate.

Needs: gymnasium
Steps: 320
Figure: mean return
Remark: Episodes of the last quarter; more is better. After a resume games begin anew, and rates are by rollouts
"""

import os
import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import lsgd  # lsgd

STEPS, ENVS, ROLLOUT, EPOCHS, PARTS, LR = int(sys.argv[1]), 4, 64, 4, 4, 2.5e-3
seed = 1
seed += int(os.environ.get("LSGD_RANK", 0))  # lsgd
envs = gym.make_vec("CartPole-v1", ENVS, vectorization_mode="sync")
torch.manual_seed(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, x):
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
worker = lsgd.wrap(agent, optimizer, steps=STEPS)  # lsgd
now, _ = envs.reset(seed=seed)
running, returns = np.zeros(ENVS), []
updates, first = STEPS // (EPOCHS * PARTS), 0
first = worker.step // (EPOCHS * PARTS)  # lsgd
for update in range(first, updates):
    optimizer.param_groups[0]["lr"] = LR * (1 - update / updates)
    seen, done = [], np.zeros(ENVS)
    for _ in range(ROLLOUT):
        with torch.no_grad():
            chances, value = agent(torch.tensor(now, dtype=torch.float32))
            action = chances.sample()
        after, reward, ended, cut, _ = envs.step(action.numpy())
        running += reward
        done = ended | cut
        returns += [(update, x) for x in running[done]]
        running[done] = 0
        seen.append((now, action, chances.log_prob(action), value, reward, done))
        now = after
    x, actions, logs, values, rewards, ends = (
        torch.stack([torch.as_tensor(each).float() for each in column]) for column in zip(*seen, strict=True)
    )
    with torch.no_grad():
        following = agent(torch.tensor(now, dtype=torch.float32))[1]
    advantages, last = torch.zeros_like(rewards), torch.zeros(ENVS)
    for t in reversed(range(ROLLOUT)):
        delta = rewards[t] + 0.99 * following * (1 - ends[t]) - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * (1 - ends[t]) * last
        following = values[t]
    x, actions, logs, values, advantages = (each.flatten(0, 1) for each in (x, actions, logs, values, advantages))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).chunk(PARTS):
            chances, value = agent(x[rows])
            ratio = (chances.log_prob(actions[rows]) - logs[rows]).exp()
            own = advantages[rows]
            own = (own - own.mean()) / (own.std() + 1e-8)
            policy = -torch.min(ratio * own, ratio.clamp(0.8, 1.2) * own).mean()
            critic = (value - advantages[rows] - values[rows]).square().mean()
            loss = policy + 0.5 * critic - 0.01 * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            worker.report(loss)  # lsgd
            optimizer.step()
    if worker.stopped:  # lsgd
        break  # lsgd

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(agent.state_dict(), "agent.pt")
    late = [x for update, x in returns if update >= 0.75 * updates]
    print(f"mean return: {np.mean(late or [0]):.1f}")
