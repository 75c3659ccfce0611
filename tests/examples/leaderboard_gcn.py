"""A training script in the style of OGB's leaderboard examples, for plain PyG; nothing in it is ours."""

import argparse
import itertools

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from ogb.nodeproppred import Evaluator, PygNodePropPredDataset
from torch_geometric.nn import GCNConv, SAGEConv


class GNN(torch.nn.Module):
    def __init__(self, make_conv, in_channels, hidden_channels, out_channels, num_layers, dropout):
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = torch.nn.ModuleList(make_conv(a, b) for a, b in itertools.pairwise(widths))
        self.bns = torch.nn.ModuleList(torch.nn.BatchNorm1d(hidden_channels) for _ in range(num_layers - 1))
        self.dropout = dropout

    def reset_parameters(self):
        for module in [*self.convs, *self.bns]:
            module.reset_parameters()

    def forward(self, x, adj_t):
        for conv, bn in zip(self.convs[:-1], self.bns, strict=True):
            x = F.relu(bn(conv(x, adj_t)))
            x = F.dropout(x, p=self.dropout, training=self.training)
        return self.convs[-1](x, adj_t).log_softmax(dim=-1)


def train(model, data, train_idx, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.adj_t)[train_idx]
    loss = F.nll_loss(out, data.y.squeeze(1)[train_idx])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data, split_idx, evaluator):
    model.eval()
    y_pred = model(data.x, data.adj_t).argmax(dim=-1, keepdim=True)
    return [
        evaluator.eval({"y_true": data.y[split_idx[part]], "y_pred": y_pred[split_idx[part]]})["acc"]
        for part in ("train", "valid", "test")
    ]


def main():
    parser = argparse.ArgumentParser(description="OGBN-Arxiv (GNN)")
    parser.add_argument("--root", default="dataset")
    parser.add_argument("--use_sage", action="store_true")
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--hidden_channels", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    transform = T.Compose([T.ToUndirected(), T.ToSparseTensor()])
    dataset = PygNodePropPredDataset(name="ogbn-arxiv", root=args.root, transform=transform)
    data = dataset[0].to(device)
    split_idx = dataset.get_idx_split()
    train_idx = split_idx["train"].to(device)
    evaluator = Evaluator(name="ogbn-arxiv")

    def make_conv(in_channels, out_channels):
        if args.use_sage:
            return SAGEConv(in_channels, out_channels)
        return GCNConv(in_channels, out_channels, cached=True)

    model = GNN(
        make_conv,
        data.num_features,
        args.hidden_channels,
        dataset.num_classes,
        args.num_layers,
        args.dropout,
    ).to(device)
    for run in range(args.runs):
        torch.manual_seed(run)
        model.reset_parameters()
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        for epoch in range(1, 1 + args.epochs):
            loss = train(model, data, train_idx, optimizer)
            scores = test(model, data, split_idx, evaluator)
            print(f"Run: {run + 1:02d}, Epoch: {epoch:02d}, Loss: {loss:.6f}, Scores: {scores}")


if __name__ == "__main__":
    main()
