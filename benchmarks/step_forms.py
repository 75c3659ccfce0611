"""Forms of training and evaluation steps as people write them, for `programs` and the tests of `capture`.

Each form is a function of a :class:`Problem` that returns a step without arguments. All steps train three
layers on one graph, with the model, the data and the optimizer from outside, unless the form says otherwise.
The forms follow PyG's and OGB's examples and public repositories.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.utils import dropout_edge, negative_sampling

import fastsparse_pyg
from fastsparse_pyg import FastGATConv, FastGCNConv, FastSAGEConv

Step = Callable[[], Any]
#: name -> makes the step.
FORMS: dict[str, Callable[[Problem], Step]] = {}
#: Forms that cannot be captured, and a part of the reason in the message.
REFUSED = {
    "adagrad": "counts its steps on the CPU",
    "negative_samples": "negative_edges",
    "dropped_edges": "edge_weight",
    "running_total": "total[0] += loss.item()",
    "prints": "print(loss.item())",
    "inner_scheduler": "scheduler.step()",
}


class Problem:
    """A graph with classes.

    Args:
        device: of all tensors.
        num_nodes: of the graph.
        num_edges: in both directions, without loops.
        num_features: of a node.
        width: of the hidden layers.
        edge_index: int64 (2, E); None: drawn.
    """

    def __init__(
        self,
        device: str,
        num_nodes: int,
        num_edges: int,
        num_features: int,
        width: int,
        edge_index: Tensor | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        if edge_index is None:
            half = torch.randint(num_nodes, (2, num_edges // 2), generator=generator)
            half[1] = torch.where(half[0] == half[1], (half[1] + 1) % num_nodes, half[1])
            edge_index = torch.cat([half, half.flip(0)], 1)
        self.device, self.num_nodes, self.width, self.num_classes = device, num_nodes, width, 3
        self.edge_index = edge_index.to(device)
        self.x = torch.randn(num_nodes, num_features, generator=generator).to(device)
        self.y = torch.randint(self.num_classes, (num_nodes,), generator=generator).to(device)
        split = torch.rand(num_nodes, generator=generator).to(device)
        self.masks = [split < 0.4, (split >= 0.4) & (split < 0.6), split >= 0.6]
        self.train_mask = self.masks[0]

    def model(self, conv: Any = FastGCNConv, out: int | None = None, **options: Any) -> Net:
        """Three layers, from the same random numbers every time."""
        torch.manual_seed(0)
        made = Net(conv, self.x.size(1), self.width, self.num_classes if out is None else out, **options)
        return made.to(self.device)


class Net(nn.Module):
    """Three layers with ReLU and dropout; multi-head layers have two heads."""

    def __init__(
        self,
        conv: Any,
        num_features: int,
        width: int,
        out: int,
        *,
        dropout: float = 0.5,
        normalizes: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        heads = options.get("heads", 1)
        self.convs = nn.ModuleList(
            [
                conv(num_features, width // heads, **options),
                conv(width, width // heads, **options),
                conv(width, out, **({**options, "concat": False} if heads > 1 else options)),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm1d(width), nn.BatchNorm1d(width)]) if normalizes else None
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, *edge_weight: Tensor) -> Tensor:
        for nth, conv in enumerate(self.convs):
            x = conv(x, edge_index, *edge_weight)
            if nth < 2:
                x = F.relu(x if self.norms is None else self.norms[nth](x))
                x = F.dropout(x, p=self.dropout, training=self.training)
        return x


def form(function: Callable[[Problem], Step]) -> Callable[[Problem], Step]:
    """Adds a form, by the function's name."""
    FORMS[function.__name__] = function
    return function


def _adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01, **options})


def _training(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The plain step: zero_grad, loss of the training nodes, backward, update."""

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        optimizer.step()
        return loss

    return train


# ---------------------------------------------------------------- optimizers


@form
def adam(problem: Problem) -> Step:
    model = problem.model()
    return _training(problem, model, _adam(model))


@form
def adamw(problem: Problem) -> Step:
    model = problem.model()
    return _training(problem, model, torch.optim.AdamW(model.parameters(), lr=0.01))


@form
def sgd(problem: Problem) -> Step:
    model = problem.model()
    return _training(problem, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@form
def rmsprop(problem: Problem) -> Step:
    model = problem.model()
    return _training(problem, model, torch.optim.RMSprop(model.parameters(), lr=0.001))


@form
def adagrad(problem: Problem) -> Step:
    model = problem.model()
    return _training(problem, model, torch.optim.Adagrad(model.parameters(), lr=0.01))


@form
def weight_decay(problem: Problem) -> Step:
    model = problem.model()
    groups = [
        {"params": model.convs[0].parameters(), "weight_decay": 5e-4},
        {"params": model.convs[1:].parameters(), "weight_decay": 0},
    ]
    return _training(problem, model, torch.optim.Adam(groups, lr=0.01))


@form
def inner_scheduler(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    train = _training(problem, model, optimizer)

    def step() -> Tensor:
        loss: Tensor = train()
        scheduler.step()
        return loss

    return step


# ---------------------------------------------------------------- models and layers


@form
def without_dropout(problem: Problem) -> Step:
    model = problem.model(dropout=0.0)
    return _training(problem, model, _adam(model))


@form
def data_as_argument(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train(x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[mask], y[mask])
        loss.backward()
        optimizer.step()
        return loss

    return functools.partial(train, problem.x, problem.edge_index, problem.y, problem.train_mask)


@form
def batch_norm(problem: Problem) -> Step:
    model = problem.model(normalizes=True)
    return _training(problem, model, _adam(model))


@form
def gat_dropout(problem: Problem) -> Step:
    model = problem.model(FastGATConv, heads=2, dropout=0.6)
    return _training(problem, model, _adam(model))


@form
def sage(problem: Problem) -> Step:
    model = problem.model(FastSAGEConv)
    return _training(problem, model, _adam(model))


@form
def cached(problem: Problem) -> Step:
    model = problem.model(cached=True)
    return _training(problem, model, _adam(model))


@form
def pyg_gcn(problem: Problem) -> Step:
    model = problem.model(GCNConv)
    return _training(problem, model, _adam(model))


@form
def pyg_gat(problem: Problem) -> Step:
    model = problem.model(GATConv, heads=2)
    return _training(problem, model, _adam(model))


@form
def accelerated(problem: Problem) -> Step:
    model = problem.model(GCNConv)
    fastsparse_pyg.accelerate(model)
    return _training(problem, model, _adam(model))


@form
def two_models(problem: Problem) -> Step:
    encoder, head = problem.model(out=problem.width), nn.Linear(problem.width, 3).to(problem.device)
    optimizers = [_adam(encoder), torch.optim.SGD(head.parameters(), lr=0.01)]

    def train() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = head(encoder(problem.x, problem.edge_index).relu())
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return train


@form
def teacher(problem: Problem) -> Step:
    """Distillation from a model in evaluation mode."""
    model, other = problem.model(), problem.model(FastSAGEConv).eval()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        with torch.no_grad():
            target = F.softmax(other(problem.x, problem.edge_index), -1)
        out = F.log_softmax(model(problem.x, problem.edge_index), -1)
        loss = F.kl_div(out, target, reduction="batchmean")
        loss.backward()
        optimizer.step()
        return loss

    return train


@form
def moving_average(problem: Problem) -> Step:
    """A second model follows the first one's parameters."""
    model = problem.model()
    optimizer, target = _adam(model), copy.deepcopy(model)
    train = _training(problem, model, optimizer)

    def step() -> Tensor:
        loss: Tensor = train()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.data.mul_(0.99).add_(fast.data, alpha=0.01)
        return loss

    return step


# ---------------------------------------------------------------- precision and gradients


@form
def autocast(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        with torch.autocast(problem.x.device.type, torch.bfloat16):
            out = model(problem.x, problem.edge_index)
            loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        optimizer.step()
        return loss

    return train


@form
def grad_scaler(problem: Problem) -> Step:
    model = problem.model()
    optimizer, device = _adam(model), problem.x.device.type
    scaler = torch.amp.GradScaler(device)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            out = model(problem.x, problem.edge_index)
            loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return train


def _with_gradients(problem: Problem, change: Callable[[nn.Module], Any]) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        change(model)
        optimizer.step()
        return loss

    return train


@form
def clip_grad_norm(problem: Problem) -> Step:
    return _with_gradients(problem, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@form
def clip_grad_value(problem: Problem) -> Step:
    return _with_gradients(problem, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1))


@form
def accumulation(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            out = model(problem.x, problem.edge_index)
            loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask]) / 2
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return train


@form
def retain_graph(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> tuple[Tensor, Tensor]:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        size = out.square().mean()
        loss.backward(retain_graph=True)
        (0.01 * size).backward()
        optimizer.step()
        return loss, size

    return train


# ---------------------------------------------------------------- losses


def _with_loss(problem: Problem, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model, model(problem.x, problem.edge_index))
        loss.backward()
        optimizer.step()
        return loss

    return train


@form
def indices(problem: Problem) -> Step:
    index = problem.train_mask.nonzero().flatten()
    return _with_loss(problem, lambda model, out: F.cross_entropy(out[index], problem.y[index]))


@form
def label_smoothing(problem: Problem) -> Step:
    criterion, mask = nn.CrossEntropyLoss(label_smoothing=0.1), problem.train_mask
    return _with_loss(problem, lambda model, out: criterion(out[mask], problem.y[mask]))


@form
def class_weights(problem: Problem) -> Step:
    criterion, mask = (
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5])).to(problem.device),
        problem.train_mask,
    )
    return _with_loss(problem, lambda model, out: criterion(out[mask], problem.y[mask]))


@form
def log_softmax(problem: Problem) -> Step:
    mask = problem.train_mask

    def loss_of(model: nn.Module, out: Tensor) -> Tensor:
        penalty = torch.stack([item.abs().sum() for item in model.parameters()]).sum()
        return F.nll_loss(F.log_softmax(out, dim=1)[mask], problem.y[mask]) + 1e-5 * penalty

    return _with_loss(problem, loss_of)


@form
def mask_of_step(problem: Problem) -> Step:
    """A mask that the step makes of the data."""

    def loss_of(model: nn.Module, out: Tensor) -> Tensor:
        mask = problem.train_mask & (problem.y != 2)
        return F.cross_entropy(out[mask], problem.y[mask])

    return _with_loss(problem, loss_of)


@form
def random_edges(problem: Problem) -> Step:
    """DropEdge by edge weights."""
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        kept = (torch.rand(problem.edge_index.size(1), device=problem.device) >= 0.2).float()
        out = model(problem.x, problem.edge_index, kept)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        optimizer.step()
        return loss

    return train


@form
def infomax(problem: Problem) -> Step:
    """Deep Graph Infomax: nodes against the same nodes with shuffled features."""
    model, mix = problem.model(out=problem.width), nn.Linear(problem.width, problem.width).to(problem.device)
    optimizer = torch.optim.Adam([*model.parameters(), *mix.parameters()], lr=0.001)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        order = torch.randperm(problem.num_nodes, device=problem.device)
        one = model(problem.x, problem.edge_index)
        other = model(problem.x[order], problem.edge_index)
        summary = mix(one.mean(0).sigmoid())
        loss = F.softplus(-(one @ summary)).mean() + F.softplus(other @ summary).mean()
        loss.backward()
        optimizer.step()
        return loss

    return train


def _link_loss(embedding: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    pairs = torch.cat([edges, others], 1)
    score = (embedding[pairs[0]] * embedding[pairs[1]]).sum(-1)
    label = torch.cat([score.new_ones(edges.size(1)), score.new_zeros(others.size(1))])
    return F.binary_cross_entropy_with_logits(score, label)


@form
def link_prediction(problem: Problem) -> Step:
    model = problem.model(out=problem.width)
    optimizer, edges = _adam(model), problem.edge_index

    def train() -> float:
        model.train()
        optimizer.zero_grad()
        others = torch.randint(problem.num_nodes, edges.shape, device=problem.device)
        loss = _link_loss(model(problem.x, edges), edges, others)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


@form
def sampled_links(problem: Problem) -> Step:
    """Some edges and as many random pairs in every step."""
    model = problem.model(out=problem.width)
    optimizer, edges = _adam(model), problem.edge_index

    def train() -> Tensor:
        optimizer.zero_grad()
        chosen = torch.randint(edges.size(1), (edges.size(1) // 4,), device=problem.device)
        others = torch.randint(problem.num_nodes, (2, edges.size(1) // 4), device=problem.device)
        loss = _link_loss(model(problem.x, edges), edges[:, chosen], others)
        loss.backward()
        optimizer.step()
        return loss

    return train


# ---------------------------------------------------------------- numbers as results


@form
def float_loss(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> float:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        optimizer.step()
        return float(loss)

    return train


@form
def loss_and_accuracy(problem: Problem) -> Step:
    model = problem.model()
    optimizer, mask = _adam(model), problem.train_mask

    def train() -> tuple[float, float]:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        loss = F.cross_entropy(out[mask], problem.y[mask])
        loss.backward()
        optimizer.step()
        correct = (out[mask].argmax(1) == problem.y[mask]).sum().item()
        return loss.item(), correct / mask.sum().item()

    return train


@form
def dictionary_of_losses(problem: Problem) -> Step:
    model = problem.model()
    optimizer, mask = _adam(model), problem.train_mask

    def train() -> dict[str, float]:
        model.train()
        optimizer.zero_grad()
        out = model(problem.x, problem.edge_index)
        losses = {"class": F.cross_entropy(out[mask], problem.y[mask]), "size": 0.01 * out.square().mean()}
        total = torch.stack(list(losses.values())).sum()
        total.backward()
        optimizer.step()
        return {name: float(loss) for name, loss in losses.items()} | {"total": round(total.item(), 4)}

    return train


@form
def accuracies(problem: Problem) -> Step:
    """Evaluation, as PyG's examples have it."""
    model = problem.model()

    @torch.no_grad()
    def test() -> list[float]:
        model.eval()
        pred = model(problem.x, problem.edge_index).argmax(dim=-1)
        found = []
        for mask in problem.masks:
            found.append(int((pred[mask] == problem.y[mask]).sum()) / int(mask.sum()))
        return found

    return test


@form
def mean_accuracy(problem: Problem) -> Step:
    model = problem.model(FastSAGEConv)

    @torch.no_grad()
    def test() -> float:
        model.eval()
        out = model(problem.x, problem.edge_index)
        return (out.argmax(-1) == problem.y)[problem.masks[2]].float().mean().item()

    return test


@form
def train_and_test(problem: Problem) -> Step:
    """An epoch in one function: a training step, then evaluation."""
    model = problem.model()
    train = _training(problem, model, _adam(model))

    def epoch() -> tuple[float, float]:
        loss = train()
        model.eval()
        with torch.no_grad():
            pred = model(problem.x, problem.edge_index).argmax(dim=-1)
        return float(loss), float((pred == problem.y).float().mean())

    return epoch


@form
def running_total(problem: Problem) -> Step:
    model, total = problem.model(), [0.0]
    train = _training(problem, model, _adam(model))

    def step() -> float:
        loss = train()
        total[0] += loss.item()
        return total[0]

    return step


@form
def prints(problem: Problem) -> Step:
    model = problem.model()
    train = _training(problem, model, _adam(model))

    def step() -> Tensor:
        loss: Tensor = train()
        print(loss.item())
        return loss

    return step


# ---------------------------------------------------------------- edges that change


@form
def negative_samples(problem: Problem) -> Step:
    model = problem.model(out=problem.width)
    optimizer, edges = _adam(model), problem.edge_index

    def train() -> Tensor:
        optimizer.zero_grad()
        others = negative_sampling(edges, num_nodes=problem.num_nodes, num_neg_samples=edges.size(1))
        loss = _link_loss(model(problem.x, edges), edges, others)
        loss.backward()
        optimizer.step()
        return loss

    return train


@form
def dropped_edges(problem: Problem) -> Step:
    model = problem.model()
    optimizer = _adam(model)

    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        kept, _ = dropout_edge(problem.edge_index, p=0.2)
        out = model(problem.x, kept)
        loss = F.cross_entropy(out[problem.train_mask], problem.y[problem.train_mask])
        loss.backward()
        optimizer.step()
        return loss

    return train
