"""PyTorch Geometric: a graph network that classifies nodes, on neighbourhoods of some of them.

Needs: torch_geometric
Steps: 120
"""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import k_hop_subgraph, stochastic_blockmodel_graph

import lsgd  # lsgd

STEPS, NODES, KINDS = int(sys.argv[1]), 900, 3
torch.manual_seed(0)
edges = stochastic_blockmodel_graph([NODES // KINDS] * KINDS, 0.012 * torch.eye(KINDS) + 0.002)
kinds = torch.arange(KINDS).repeat_interleave(NODES // KINDS)
graph = Data(x=torch.randn(NODES, 16) + 0.5 * F.one_hot(kinds, 16), edge_index=edges, y=kinds)
mixed = torch.randperm(NODES)
train, test = mixed[150:], mixed[:150]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(16, 32), SAGEConv(32, KINDS)

    def forward(self, x, edge_index):
        x = F.dropout(self.first(x, edge_index).relu(), 0.2, self.training)
        return self.second(x, edge_index)


def part(nodes):
    seeds = torch.tensor(nodes)
    subset, edge_index, places, _ = k_hop_subgraph(seeds, 2, graph.edge_index, relabel_nodes=True)
    return graph.x[subset], edge_index, places, graph.y[seeds]


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
loader = DataLoader(train.tolist(), batch_size=32, shuffle=True, collate_fn=part)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for x, edge_index, places, y in loader:
        loss = F.cross_entropy(model(x, edge_index)[places], y)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "nodes.pt")
    model.eval()
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(graph.x, edges)[test], kinds[test]).item():.4f}")
