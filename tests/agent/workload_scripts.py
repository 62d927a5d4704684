"""Small scripts of users, for tests of hotspots and patches."""

TRAIN = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        p = F.softmax(self.up(self.norm(x)) * 0.5, dim=-1)
        return x + self.down(F.gelu(p, approximate="tanh"))


class Model(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 32)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :8].argmax(-1)).backward()
    optimizer.step()
"""
