"""Training programs as people write them, for `programs`: a model, its data, an epoch with validation.

A program is a function of a :class:`Kit`, which gives it the layers and loaders of one variant. It returns an
epoch: a function that trains on everything once, validates, and returns the mean loss and the metric on the
device. All of them follow the examples of PyG and DGL.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAE, BatchNorm, GPSConv, HeteroConv, LightGCN, global_mean_pool

from fastsparse_core import Adjacency, capture, spmm
from fastsparse_core.sampling import negative_edges

from . import epochs, suite

Epoch = Callable[[], Tensor]
CLASSES, RELATIONS = 8, 16


class Sizes(NamedTuple):
    """The sizes of the programs.

    Attributes:
        width: of hidden layers.
        train_nodes: seeds of an epoch of sampled neighbours.
        seeds: of one batch.
        molecules: of an epoch.
        batch: molecules in a batch.
        links: of an epoch of link prediction.
        workers: processes of the framework's loader.
    """

    width: int
    train_nodes: int
    seeds: int
    molecules: int
    batch: int
    links: int
    workers: int


class Layers:
    """Layers by the framework's names: its own, or the drop-ins."""

    def __init__(self, framework: str, is_ours: bool) -> None:
        own = {"pyg": "torch_geometric.nn", "dgl": "dgl.nn.pytorch"}[framework]
        drop_ins = importlib.import_module(f"fastsparse_{framework}")  # before DGL, whose import it repairs
        self._module = drop_ins if is_ours else importlib.import_module(own)
        self._prefix = "Fast" if is_ours else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, self._prefix + name)


class Kit:
    """Layers, loaders and settings from which one variant makes a program.

    Args:
        framework: `pyg` or `dgl`.
        sizes: of the data and the model.
        device: of model and batches.
        layers: whether layers are drop-ins.
        loader: whether the loader is ours.
        captures: whether steps are captured.
        compiles: whether `torch.compile` gets the model.

    Attributes:
        nn: the layers.
        steps: the captured steps.
    """

    def __init__(
        self,
        framework: str,
        sizes: Sizes,
        device: torch.device,
        *,
        layers: bool = False,
        loader: bool = False,
        captures: bool = False,
        compiles: bool = False,
    ) -> None:
        self.sizes, self.device, self.framework = sizes, device, framework
        self.nn = Layers(framework, layers)
        self.layers_are_ours = layers
        self.loader_is_ours, self.captures, self.compiles = loader, captures, compiles
        self.steps: list[Any] = []

    def model(self, model: nn.Module) -> Any:
        """The model on the device."""
        model = model.to(self.device)
        return torch.compile(model) if self.compiles else model

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, captured in the variant that captures."""
        if not self.captures:
            return function
        step = capture(function)
        self.steps.append(step.captured)  # type: ignore[attr-defined]
        return step

    def loader(self, name: str, *args: Any, **options: Any) -> Iterable[Any]:
        """A loader by the framework's name for it, with the framework's best settings or on the device."""
        options = {"drop_last": True, **options}
        if self.loader_is_ours:
            module, more = f"fastsparse_{self.framework}", {"device": self.device}
        else:
            module = {"pyg": "torch_geometric.loader", "dgl": "dgl.dataloading"}[self.framework]
            workers = self.sizes.workers
            more = {"num_workers": workers, "persistent_workers": workers > 0}  # type: ignore[dict-item]
            if self.framework == "pyg":
                more["pin_memory"] = self.device.type == "cuda"  # type: ignore[assignment]
            elif name == "DataLoader":
                more["device"] = self.device
        return getattr(importlib.import_module(module), name)(*args, **options, **more)  # type: ignore[no-any-return]


class Program(NamedTuple):
    """A program and its properties.

    Attributes:
        make: makes an epoch from a kit.
        framework: `pyg` or `dgl`.
        loads: whether it has a loader.
        compiles: whether `torch.compile` is tried.
        metric: what the second number of an epoch is.
        equivalent: for a program of DGL, PyG's program with the same model and data.
    """

    make: Callable[[Kit], Epoch]
    framework: str
    loads: bool
    compiles: bool
    metric: str
    equivalent: str | None


PROGRAMS: dict[str, Program] = {}


def program(
    framework: str = "pyg",
    *,
    loads: bool = True,
    compiles: bool = False,
    metric: str = "accuracy",
    equivalent: str | None = None,
) -> Callable[[Callable[[Kit], Epoch]], Callable[[Kit], Epoch]]:
    """Adds a program, by the function's name."""

    def add(make: Callable[[Kit], Epoch]) -> Callable[[Kit], Epoch]:
        PROGRAMS[make.__name__] = Program(make, framework, loads, compiles, metric, equivalent)
        return make

    return add


# ---------------------------------------------------------------- data


@functools.cache
def node_data(name: str, features: int) -> Data:
    """A graph on the CPU whose neighbours often share a class, with features that depend on the class."""
    if name == "pubmed" and suite.at_hand([name]):
        name = suite.REAL + name
    graph = suite.load(name, "cpu")
    edge_index, count = graph.edge_index().long(), graph.rowptr.numel() - 1
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(count, CLASSES, generator=generator)
    for _ in range(3):
        score = F.normalize(score.index_add(0, edge_index[1], score[edge_index[0]]))
    y = (score - score.mean(0)).argmax(1)
    centres = torch.randn(CLASSES, features, generator=generator)
    x = 0.25 * centres[y] + torch.randn(count, features, generator=generator)
    split = torch.rand(count, generator=generator)
    return Data(x=x, edge_index=edge_index, y=y, train_mask=split < 0.5, val_mask=split >= 0.8)


@functools.cache
def molecules(count: int) -> list[Data]:
    """Molecules with a kind for every bond, and a class that depends on the mean of their features."""
    found = epochs.molecules(count)
    generator = torch.Generator().manual_seed(1)
    for item in found:
        item.edge_attr = torch.randint(4, (item.num_edges,), generator=generator)
        item.y = (item.x[:, :8].mean(0).sum() > 0).float().view(1, 1)
    return found


def area_under_curve(score: Tensor, label: Tensor) -> Tensor:
    """Of the receiver operating characteristic, from ranks: nothing is read from the device."""
    rank = torch.empty_like(score, dtype=torch.float64)
    rank[score.argsort()] = torch.arange(1, score.numel() + 1, dtype=torch.float64, device=score.device)
    positive = label.double().sum()
    return ((rank * label).sum() - positive * (positive + 1) / 2) / (positive * (label.numel() - positive))


# ---------------------------------------------------------------- node classification, full batch


class Net(nn.Module):
    """Layers with dropout and ReLU, or ELU, between them; with batch normalisation if wanted."""

    def __init__(
        self, *convs: nn.Module, normalizes: int = 0, act: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.convs, self.act = nn.ModuleList(convs), act
        self.norms = nn.ModuleList(BatchNorm(normalizes) for _ in convs[1:]) if normalizes else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for nth, conv in enumerate(self.convs):
            if nth:
                x = self.act(x if self.norms is None else self.norms[nth - 1](x))
                x = F.dropout(x, p=0.5, training=self.training)
            x = conv(x, edge_index)
        return x


def _full_batch(kit: Kit, data: Data, model: nn.Module, lr: float = 0.01) -> Epoch:
    data = data.to(kit.device)
    model = kit.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4)

    @kit.step
    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss

    @kit.step
    @torch.no_grad()
    def test() -> Tensor:
        model.eval()
        pred = model(data.x, data.edge_index).argmax(dim=-1)
        return (pred[data.val_mask] == data.y[data.val_mask]).float().mean()

    return lambda: torch.stack([train().detach(), test()])


@program(loads=False, compiles=True)
def gcn(kit: Kit) -> Epoch:
    data, width = node_data("pubmed", 500), kit.sizes.width
    convs = [kit.nn.GCNConv(500, width, cached=True), kit.nn.GCNConv(width, CLASSES, cached=True)]
    return _full_batch(kit, data.clone(), Net(*convs))


@program(loads=False)
def gat(kit: Kit) -> Epoch:
    data, width = node_data("pubmed", 500), kit.sizes.width
    first = kit.nn.GATConv(500, width // 8, heads=8, dropout=0.6)
    second = kit.nn.GATConv(width, CLASSES, heads=1, concat=False, dropout=0.6)
    return _full_batch(kit, data.clone(), Net(first, second, act=F.elu), lr=0.005)


@program(loads=False, compiles=True)
def sage(kit: Kit) -> Epoch:
    data, width = node_data("ogbn-arxiv", 128), kit.sizes.width
    sizes = [128, width, width, CLASSES]
    convs = [kit.nn.SAGEConv(*pair) for pair in itertools.pairwise(sizes)]
    return _full_batch(kit, data.clone(), Net(*convs, normalizes=width))


class GCNII(nn.Module):
    """Sixteen layers that go back to the first one's input."""

    def __init__(self, layers: Any, size_in: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(size_in, width), nn.Linear(width, CLASSES)
        self.convs = nn.ModuleList(
            layers.GCN2Conv(width, alpha=0.1, theta=0.5, layer=nth + 1, shared_weights=False, cached=True)
            for nth in range(16)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = F.relu(self.first(F.dropout(x, 0.5, self.training)))
        for conv in self.convs:
            x = F.relu(conv(F.dropout(x, 0.5, self.training), x_0, edge_index))
        return self.last(F.dropout(x, 0.5, self.training))


@program(loads=False)
def gcn2(kit: Kit) -> Epoch:
    return _full_batch(kit, node_data("pubmed", 500).clone(), GCNII(kit.nn, 500, kit.sizes.width))


class EntityClassifier(nn.Module):
    """RGCN on entities without features."""

    def __init__(self, layers: Any, nodes: int, width: int, edge_type: Tensor) -> None:
        super().__init__()
        self.first = layers.FastRGCNConv(nodes, width, RELATIONS, num_bases=30)
        self.second = layers.FastRGCNConv(width, CLASSES, RELATIONS, num_bases=30)
        self.register_buffer("edge_type", edge_type)

    def forward(self, x: None, edge_index: Tensor) -> Tensor:
        x = F.relu(self.first(None, edge_index, self.edge_type))
        return self.second(x, edge_index, self.edge_type)


@program(loads=False)
def rgcn(kit: Kit) -> Epoch:
    data = node_data("pubmed", 500).clone()
    edge_type = torch.randint(RELATIONS, (data.num_edges,), generator=torch.Generator().manual_seed(0))
    model = EntityClassifier(kit.nn, data.x.size(0), 16, edge_type)
    data.num_nodes, data.x = data.x.size(0), None
    return _full_batch(kit, data, model)


# ---------------------------------------------------------------- batches


def _epoch(
    kit: Kit,
    model: nn.Module,
    loaders: tuple[Iterable[Any], Iterable[Any]],
    outputs: Callable[..., tuple[Tensor, Tensor]],
    lr: float = 0.003,
) -> Epoch:
    """An epoch of batches: `outputs` gives logits and labels of a batch; one logit means two classes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    @kit.step
    def train(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        out, y = outputs(*batch)
        loss = F.cross_entropy(out, y) if y.dim() == 1 else F.binary_cross_entropy_with_logits(out, y)
        loss.backward()
        optimizer.step()
        return loss

    @kit.step
    @torch.no_grad()
    def test(*batch: Any) -> Tensor:
        out, y = outputs(*batch)
        pred = out.argmax(dim=-1) if y.dim() == 1 else (out > 0).float()
        return (pred == y).float().mean()

    def epoch() -> Tensor:
        model.train()
        losses = [train(*_moved(batch, kit.device)).detach() for batch in loaders[0]]
        model.eval()
        scores = [test(*_moved(batch, kit.device)) for batch in loaders[1]]
        return torch.stack([torch.stack(losses).mean(), torch.stack(scores).mean()])

    return epoch


def _moved(batch: Any, device: torch.device) -> list[Any]:
    """The arguments of a step: PyG's batch, or DGL's graph and labels, or blocks, which are on the device."""
    items = batch if isinstance(batch, tuple | list) else [batch]
    return [item if isinstance(item, list) else item.to(device, non_blocking=True) for item in items]


def _seeds(kit: Kit, count: int) -> tuple[Tensor, Tensor]:
    """Nodes of training and validation, a quarter as many."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    wanted = kit.sizes.train_nodes
    return order[:wanted], order[wanted : wanted + max(wanted // 4, kit.sizes.seeds)]


def _sampled(kit: Kit, convs: list[nn.Module], act: Callable[[Tensor], Tensor] = F.relu) -> Epoch:
    data = node_data("ogbn-arxiv", 128)
    train, val = (
        kit.loader(
            "NeighborLoader",
            data,
            num_neighbors=[10, 10],
            input_nodes=nodes,
            batch_size=kit.sizes.seeds,
            shuffle=shuffle,
        )
        for nodes, shuffle in zip(_seeds(kit, data.num_nodes), (True, False), strict=True)
    )
    model = kit.model(Net(*convs, act=act))

    def outputs(batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        return out, batch.y[: batch.batch_size]

    return _epoch(kit, model, (train, val), outputs)


@program()
def sage_sampled(kit: Kit) -> Epoch:
    width = kit.sizes.width
    return _sampled(kit, [kit.nn.SAGEConv(128, width), kit.nn.SAGEConv(width, CLASSES)])


@program()
def gat_sampled(kit: Kit) -> Epoch:
    width = kit.sizes.width
    first = kit.nn.GATConv(128, width // 4, heads=4)
    return _sampled(kit, [first, kit.nn.GATConv(width, CLASSES, heads=1)], act=F.elu)


class HeteroSAGE(nn.Module):
    """Two layers, each with a SAGEConv per edge type."""

    def __init__(self, layers: Any, edge_types: list[tuple[str, str, str]], width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            HeteroConv({kind: layers.SAGEConv(size_in, width) for kind in edge_types}, aggr="sum")
            for size_in in (128, width)
        )
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        for conv in self.convs:
            x_dict = {key: F.relu(x) for key, x in conv(x_dict, edge_index_dict).items()}
        return self.out(x_dict["paper"])


@functools.cache
def _papers() -> HeteroData:
    papers, generator = node_data("ogbn-arxiv", 128), torch.Generator().manual_seed(3)
    count = int(papers.num_nodes or 0)
    data = HeteroData()
    data["paper"].x, data["paper"].y = papers.x, papers.y
    data["author"].x = torch.randn(count // 2, 128, generator=generator)
    writes = torch.stack(
        [
            torch.randint(count // 2, (3 * count,), generator=generator),
            torch.arange(count).repeat_interleave(3),
        ]
    )
    data["paper", "cites", "paper"].edge_index = papers.edge_index
    data["author", "writes", "paper"].edge_index = writes
    data["paper", "rev_writes", "author"].edge_index = writes.flip(0)
    return data


@program()
def hetero_sage(kit: Kit) -> Epoch:
    data = _papers()
    train, val = (
        kit.loader(
            "NeighborLoader",
            data,
            num_neighbors=[10, 10],
            input_nodes=("paper", nodes),
            batch_size=kit.sizes.seeds,
            shuffle=shuffle,
        )
        for nodes, shuffle in zip(_seeds(kit, data["paper"].num_nodes), (True, False), strict=True)
    )
    model = kit.model(HeteroSAGE(kit.nn, data.edge_types, kit.sizes.width))

    def outputs(batch: Any) -> tuple[Tensor, Tensor]:
        count = batch["paper"].batch_size
        return model(batch.x_dict, batch.edge_index_dict)[:count], batch["paper"].y[:count]

    return _epoch(kit, model, (train, val), outputs)


# ---------------------------------------------------------------- molecules


class MoleculeNet(nn.Module):
    """Four layers with batch normalisation; bonds are embedded if `bonds` says how wide."""

    def __init__(self, make: Callable[[int], nn.Module], width: int, bonds: int | None = None) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(epochs.FEATURES, width), nn.Linear(width, 1)
        self.bonds = nn.Embedding(4, bonds) if bonds else None
        self.convs = nn.ModuleList(make(width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))

    def forward(self, batch: Any) -> Tensor:
        x = self.first(batch.x)
        more = () if self.bonds is None else (self.bonds(batch.edge_attr),)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x, batch.edge_index, *more)))
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs))


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))


def _split(kit: Kit) -> tuple[list[Data], list[Data]]:
    found = molecules(kit.sizes.molecules + max(kit.sizes.molecules // 4, kit.sizes.batch))
    return found[: kit.sizes.molecules], found[kit.sizes.molecules :]


def _molecules(kit: Kit, model: nn.Module) -> Epoch:
    train, val = (
        kit.loader("DataLoader", part, batch_size=kit.sizes.batch, shuffle=shuffle)
        for part, shuffle in zip(_split(kit), (True, False), strict=True)
    )
    model = kit.model(model)
    return _epoch(kit, model, (train, val), lambda batch: (model(batch), batch.y), lr=0.001)


@program()
def gin_molecules(kit: Kit) -> Epoch:
    return _molecules(kit, MoleculeNet(lambda width: kit.nn.GINConv(_perceptron(width)), kit.sizes.width))


@program()
def gcn_molecules(kit: Kit) -> Epoch:
    return _molecules(kit, MoleculeNet(lambda width: kit.nn.GCNConv(width, width), kit.sizes.width))


@program()
def gine_molecules(kit: Kit) -> Epoch:
    width = kit.sizes.width
    return _molecules(kit, MoleculeNet(lambda width: kit.nn.GINEConv(_perceptron(width)), width, width))


@program()
def pna_molecules(kit: Kit) -> Epoch:
    degree = torch.cat(
        [torch.bincount(item.edge_index[1], minlength=item.num_nodes) for item in _split(kit)[0]]
    )
    options = {
        "aggregators": ["mean", "min", "max", "std"],
        "scalers": ["identity", "amplification", "attenuation"],
        "deg": torch.bincount(degree),
        "edge_dim": 16,
        "towers": 4,
    }
    return _molecules(
        kit, MoleculeNet(lambda width: kit.nn.PNAConv(width, width, **options), kit.sizes.width, 16)
    )


class GPS(nn.Module):
    """Three of PyG's GPSConv: GINE, plus attention among all atoms of a molecule."""

    def __init__(self, layers: Any, width: int) -> None:
        super().__init__()
        self.first, self.bonds = nn.Linear(epochs.FEATURES, width), nn.Embedding(4, width)
        self.convs = nn.ModuleList(
            GPSConv(width, layers.GINEConv(_perceptron(width)), heads=4) for _ in range(3)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, batch: Any) -> Tensor:
        x, bonds = self.first(batch.x), self.bonds(batch.edge_attr)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.batch, edge_attr=bonds)
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs))


@program()
def gps_molecules(kit: Kit) -> Epoch:
    return _molecules(kit, GPS(kit.nn, kit.sizes.width // 2))


# ---------------------------------------------------------------- links and recommendation


@functools.cache
def _links(name: str, features: int) -> tuple[Data, Tensor, Tensor]:
    """A graph without a tenth of its links, the removed links as pairs, and as many random pairs."""
    data, generator = node_data(name, features).clone(), torch.Generator().manual_seed(4)
    one_way = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]
    one_way = one_way[:, torch.randperm(one_way.size(1), generator=generator)]
    held_out = one_way.size(1) // 10
    rest = one_way[:, held_out:]
    data.edge_index = torch.cat([rest, rest.flip(0)], 1)
    others = torch.randint(int(data.num_nodes or 0), (2, held_out), generator=generator)
    return data, one_way[:, :held_out], others


@program(metric="AUC")
def sage_links(kit: Kit) -> Epoch:
    data, held_out, others = _links("ogbn-arxiv", 128)
    width, count = kit.sizes.width, kit.sizes.links
    half = max(count // 8, kit.sizes.seeds)
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(5))
    options = {"num_neighbors": [10, 5], "batch_size": kit.sizes.seeds}
    train_loader = kit.loader(
        "LinkNeighborLoader",
        data,
        edge_label_index=data.edge_index[:, order[:count]],
        neg_sampling_ratio=1.0,
        shuffle=True,
        **options,
    )
    pairs = torch.cat([held_out[:, :half], others[:, :half]], 1)
    label = torch.arange(pairs.size(1)) < pairs.size(1) // 2
    val_loader = kit.loader(
        "LinkNeighborLoader", data, edge_label_index=pairs, edge_label=label.float(), **options
    )
    model = kit.model(Net(kit.nn.SAGEConv(128, width), kit.nn.SAGEConv(width, width)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def score(batch: Any) -> Tensor:
        out = model(batch.x, batch.edge_index)
        src, dst = batch.edge_label_index
        return (out[src] * out[dst]).sum(dim=-1)

    @kit.step
    def train(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(score(batch), batch.edge_label.float())
        loss.backward()
        optimizer.step()
        return loss

    @kit.step
    @torch.no_grad()
    def test(batch: Any) -> tuple[Tensor, Tensor]:
        return score(batch), batch.edge_label.float()

    def epoch() -> Tensor:
        model.train()
        losses = [train(*_moved(batch, kit.device)).detach() for batch in train_loader]
        model.eval()
        found = [test(*_moved(batch, kit.device)) for batch in val_loader]
        scores, labels = (torch.cat(part) for part in zip(*found, strict=True))
        return torch.stack([torch.stack(losses).mean().double(), area_under_curve(scores, labels)])

    return epoch


@program(loads=False, metric="AUC")
def gae(kit: Kit) -> Epoch:
    data, held_out, others = _links("pubmed", 500)
    data, held_out, others = (item.to(kit.device) for item in (data.clone(), held_out, others))
    width = kit.sizes.width
    convs = [kit.nn.GCNConv(500, width, cached=True), kit.nn.GCNConv(width, 16, cached=True)]
    model = kit.model(GAE(Net(*convs)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    edges = data.edge_index
    adj = Adjacency.from_coo(edges[0], edges[1], (data.num_nodes, data.num_nodes))

    @kit.step
    def train() -> Tensor:
        model.train()
        optimizer.zero_grad()
        z = model.encode(data.x, edges)
        # `negative_sampling`, which recon_loss calls without negatives, finds its number of pairs on the GPU.
        loss = model.recon_loss(z, edges, negative_edges(adj, edges.size(1)) if kit.captures else None)
        loss.backward()
        optimizer.step()
        return loss

    @kit.step
    @torch.no_grad()
    def test() -> Tensor:
        model.eval()
        z = model.encode(data.x, edges)
        score = torch.cat([model.decoder(z, pairs) for pairs in (held_out, others)])
        label = torch.cat([torch.ones_like(held_out[0]), torch.zeros_like(others[0])])
        return area_under_curve(score, label)

    return lambda: torch.stack([train().detach().double(), test()])


@program(loads=False, metric="recall@20")
def lightgcn(kit: Kit) -> Epoch:
    """Users and items with BPR loss: every step runs the whole graph for some of the purchases."""
    return _recommendation(kit, kit.nn.LightGCN)


class SparseLightGCN(LightGCN):
    """LightGCN as its authors wrote it: products with a normalised matrix that is made once.

    Args:
        multiply: the product, of that matrix (COO) and the embeddings.
    """

    def __init__(self, *sizes: Any, multiply: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.multiply = multiply
        self.graph: Tensor | None = None

    def get_embedding(self, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        if self.graph is None:
            degree = torch.bincount(edge_index[1], minlength=self.num_nodes).float().clamp(min=1).rsqrt()
            values = degree[edge_index[0]] * degree[edge_index[1]]
            size = (self.num_nodes, self.num_nodes)
            self.graph = torch.sparse_coo_tensor(edge_index.flip(0), values, size).coalesce()
        found = [self.embedding.weight]
        for _ in range(self.num_layers):
            found.append(self.multiply(self.graph, found[-1]))
        return torch.stack(found, dim=1).mean(dim=1)


@program(loads=False, metric="recall@20")
def lightgcn_sparse(kit: Kit) -> Epoch:
    """The same with the authors' `torch.sparse.mm`; by hand that is `spmm`."""
    kept: list[Adjacency] = []

    def by_hand(graph: Tensor, x: Tensor) -> Tensor:
        if not kept:
            kept.append(Adjacency.from_coo(*graph.indices(), graph.shape))  # type: ignore[misc]
        return spmm(kept[0], x, graph.values())

    multiply = by_hand if kit.layers_are_ours else torch.sparse.mm
    return _recommendation(kit, functools.partial(SparseLightGCN, multiply=multiply))


#: Sizes of Gowalla, a data set of LightGCN's authors: users, items, purchases to train with, and
#: purchases per batch.
_GOWALLA = 29_858, 40_981, 810_128, 2_048
_PARTS = 12  # an epoch takes one part of the purchases and evaluates one part of the users


def _recommendation(kit: Kit, make: Callable[..., Any]) -> Epoch:
    device, share = kit.device, min(kit.sizes.links / 65_536, 1)
    users, items, purchases, most = (max(int(size * share), 48) for size in _GOWALLA)
    generator = torch.Generator().manual_seed(6)
    groups = 16  # users of a group buy in a part of the items
    user = torch.randint(users, (purchases * 10 // 9,), generator=generator)
    near = torch.randint(max(items // groups, 2), user.shape, generator=generator)
    item = (user % groups * (items // groups) + near) % items
    key = (user * items + item).unique()
    key = key[torch.randperm(key.numel(), generator=generator)]
    bought = torch.stack([key // items, key % items]).to(device)
    held_out, bought = bought[:, : key.numel() // 10], bought[:, key.numel() // 10 :].contiguous()
    forth = bought + torch.tensor([[0], [users]], device=device)
    whole = torch.cat([forth, forth.flip(0)], 1)
    judged = users // _PARTS
    seen, wanted = (torch.zeros(judged, items, dtype=torch.bool, device=device) for _ in range(2))
    for pairs, mask in ((bought, seen), (held_out, wanted)):
        user, item = pairs[:, pairs[0] < judged]
        mask[user, item] = True
    model = kit.model(make(users + items, embedding_dim=64, num_layers=3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    batch_size = min(most, bought.size(1) // _PARTS)
    steps = bought.size(1) // batch_size // _PARTS

    @kit.step
    def train(index: Tensor) -> Tensor:
        optimizer.zero_grad()
        user, item = bought[:, index]
        other = torch.randint(items, user.shape, device=device)
        pairs = torch.stack([user.repeat(2), torch.cat([item, other]) + users])
        better, worse = model(whole, pairs).chunk(2)
        loss = model.recommendation_loss(better, worse, node_id=pairs.flatten(), lambda_reg=1e-4)
        loss.backward()
        optimizer.step()
        return loss

    @kit.step
    @torch.no_grad()
    def test() -> Tensor:
        embedding = model.get_embedding(whole)
        score = embedding[:judged] @ embedding[users:].t()
        top = score.masked_fill(seen, float("-inf")).topk(min(20, items), dim=-1).indices
        hits, total = wanted.gather(1, top).sum(1), wanted.sum(1)
        return (hits / total.clamp(min=1)).sum() / (total > 0).sum()

    def epoch() -> Tensor:
        order = torch.randperm(bought.size(1), device=device)
        losses = [train(index).detach() for index in order[: steps * batch_size].split(batch_size)]
        return torch.stack([torch.stack(losses).mean(), test()])

    return epoch


# ---------------------------------------------------------------- DGL


class DGLSAGE(nn.Module):
    """Two layers on the blocks of a sampler."""

    def __init__(self, layers: Any, width: int) -> None:
        super().__init__()
        sizes = [128, width, CLASSES]
        self.convs = nn.ModuleList(layers.SAGEConv(*pair, "mean") for pair in itertools.pairwise(sizes))

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        for nth, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            if nth:
                x = F.dropout(F.relu(x), p=0.5, training=self.training)
            x = conv(block, x)
        return x


@program("dgl", equivalent="sage_sampled")
def dgl_sage_sampled(kit: Kit) -> Epoch:
    import dgl

    data = node_data("ogbn-arxiv", 128)
    graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    graph.ndata["feat"], graph.ndata["label"] = data.x, data.y
    module = importlib.import_module("fastsparse_dgl" if kit.loader_is_ours else "dgl.dataloading")
    sampler = module.NeighborSampler([10, 10], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    train, val = (
        kit.loader("DataLoader", graph, nodes, sampler, batch_size=kit.sizes.seeds, shuffle=shuffle)
        for nodes, shuffle in zip(_seeds(kit, data.num_nodes), (True, False), strict=True)
    )
    model = kit.model(DGLSAGE(kit.nn, kit.sizes.width))

    def outputs(blocks: Any) -> tuple[Tensor, Tensor]:
        return model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]

    return _epoch(kit, model, (_Blocks(train), _Blocks(val)), outputs)


class _Blocks:
    """The blocks of a loader's batches, the one argument of a step."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return ([blocks] for _, _, blocks in self._loader)


class DGLGIN(nn.Module):
    """The layers of `MoleculeNet` with DGL's GINConv."""

    def __init__(self, layers: Any, width: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(epochs.FEATURES, width), nn.Linear(width, 1)
        self.convs = nn.ModuleList(layers.GINConv(_perceptron(width), "sum") for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))

    def forward(self, graph: Any) -> Tensor:
        import dgl

        x = self.first(graph.ndata["feat"])
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(graph, x)))
        with graph.local_scope():
            graph.ndata["h"] = x
            return self.out(dgl.mean_nodes(graph, "h"))


@program("dgl", equivalent="gin_molecules")
def dgl_gin_molecules(kit: Kit) -> Epoch:
    import dgl

    if kit.device.type == "cuda":
        importlib.import_module("fastsparse_dgl").enable()  # lets pip's DGL hold graphs on the GPU

    def graphs_of(part: list[Data]) -> list[tuple[Any, Tensor]]:
        found = []
        for item in part:
            graph = dgl.graph(tuple(item.edge_index), num_nodes=item.num_nodes)
            graph.ndata["feat"] = item.x
            found.append((graph, item.y.view(1)))
        return found

    train, val = (
        kit.loader("GraphDataLoader", graphs_of(part), batch_size=kit.sizes.batch, shuffle=shuffle)
        for part, shuffle in zip(_split(kit), (True, False), strict=True)
    )
    model = kit.model(DGLGIN(kit.nn, kit.sizes.width))
    return _epoch(kit, model, (train, val), lambda graph, y: (model(graph), y), lr=0.001)
