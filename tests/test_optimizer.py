"""Parameter groups, optimizers, schedule: each test names the mistake that would turn it red."""

import io
import math

import pytest
import torch
import torch.distributed as dist
from conftest import spawn
from torch import nn

import muon
from model import GPT, GPTConfig
from muon import orthogonalize
from optimizer import (
    OptimizerConfig,
    create_optimizer,
    learning_rate_factor,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)

NAMES = ["adamw", "muon"]


def make_model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 11, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, **changes}
    return GPT(GPTConfig(**sizes))


def set_gradients(model, seed):
    """Give every trainable parameter a gradient that depends on the seed alone."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None


def take_steps(model, optimizer, seeds):
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step()


def assert_same(model, other):
    """Equal to the bit."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def is_matrix(name):
    """By name, not by shape: the matrices that multiply activations and aren't tied to an embedding."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


# --- Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "sgd"},
        {"name": "AdamW"},
        {"learning_rate": 0.0},
        {"learning_rate": -1e-3},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"muon_learning_rate": 0.0},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"betas": [0.9]},
        {"betas": [0.9, 0.95, 0.99]},
        {"betas": [0.9, 1.0]},
        {"betas": [-0.1, 0.9]},
        {"warmup_steps": -1},
        {"lr_decay": "steps"},
        {"min_lr_ratio": -0.1},
        {"min_lr_ratio": 1.5},
        {"min_lr_ratio": math.nan},
        {"layer_decay": 0.0},
        {"layer_decay": 1.1},
    ],
    ids=str,
)
def test_bad_configuration_is_refused(wrong):
    """Catches a value that trains wrongly, or that fails deep inside torch, where one line should name it."""
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=r"^[^\n]*: must be [^\n]*$") as caught:
        OptimizerConfig(**wrong)
    assert str(caught.value).startswith(f"optimizer_config.{name}={value}: ")


@pytest.mark.parametrize(
    "edge",
    [
        {"weight_decay": 0.0},
        {"betas": (0.0, 0.0)},
        {"warmup_steps": 0},
        {"min_lr_ratio": 0.0},
        {"min_lr_ratio": 1.0},
        {"layer_decay": 1.0},
    ],
    ids=str,
)
def test_the_edges_of_the_ranges_are_allowed(edge):
    """Catches a limit that shuts out its own value, so that what the message allows is refused."""
    model = make_model()
    take_steps(model, create_optimizer(model, OptimizerConfig(**edge)), [1])
    assert all(p.isfinite().all() for p in model.parameters())


def test_betas_may_be_a_list():
    """Catches a list that breaks the comparison with what a snapshot holds: YAML knows no tuples."""
    assert OptimizerConfig(betas=[0.8, 0.9]) == OptimizerConfig(betas=(0.8, 0.9))


# --- Schedule --------------------------------------------------------------------------------------------------------

HALF = math.sqrt(0.5)  # cos 45°


@pytest.mark.parametrize(
    ("lr_decay", "warmup_steps", "total_steps", "min_lr_ratio", "table"),
    [
        # 4 steps up, 8 steps down. (1 + cos) / 2 at 0, 45, 90, 135 and 180 degrees, scaled to 0.1 ... 1.
        (
            *("cosine", 4, 12, 0.1),
            {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 6: 0.1 + 0.45 * (1 + HALF), 8: 0.55, 10: 0.1 + 0.45 * (1 - HALF)}
            | {12: 0.1, 13: 0.1, 1000: 0.1},
        ),
        # No warm-up: the first step has the whole learning rate.
        ("cosine", 0, 4, 0.0, {0: 1.0, 1: (1 + HALF) / 2, 2: 0.5, 3: (1 - HALF) / 2, 4: 0.0, 5: 0.0}),
        # A ratio of 1: no decay.
        ("cosine", 2, 10, 1.0, {0: 0.5, 1: 1.0, 2: 1.0, 6: 1.0, 10: 1.0, 11: 1.0}),
        # A run that ends within the warm-up, or as it ends.
        ("cosine", 4, 2, 0.1, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 0.1}),
        ("cosine", 4, 4, 0.1, {3: 1.0, 4: 0.1}),
        ("cosine", 0, 0, 0.1, {0: 0.1}),
        ("linear", 4, 12, 0.1, {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.775, 8: 0.55, 11: 0.2125, 12: 0.1, 13: 0.1}),
        # 4 steps up, constant up to four fifths of 20, 4 steps down.
        (
            *("wsd", 4, 20, 0.1),
            {0: 0.25, 3: 1.0, 4: 1.0, 15: 1.0, 16: 1.0, 17: 0.775, 18: 0.55, 19: 0.325, 20: 0.1, 21: 0.1},
        ),
        # A number that has no whole fifth: the last 3 of 12 steps.
        ("wsd", 0, 12, 0.0, {0: 1.0, 9: 1.0, 10: 2 / 3, 11: 1 / 3, 12: 0.0}),
        # A warm-up that ends within the last fifth: from there down to the end.
        ("wsd", 8, 10, 0.0, {7: 1.0, 8: 1.0, 9: 0.5, 10: 0.0}),
        ("wsd", 9, 10, 0.0, {8: 1.0, 9: 1.0, 10: 0.0}),
        ("wsd", 12, 10, 0.0, {8: 0.75, 9: 10 / 12}),
        ("wsd", 0, 1, 0.0, {0: 1.0, 1: 0.0}),
        ("wsd", 0, 0, 0.1, {0: 0.1}),
    ],
)
def test_schedule_equals_a_table(lr_decay, warmup_steps, total_steps, min_lr_ratio, table):
    """Catches a schedule off by one step, counted in epochs, that goes up past its end or below its floor (row 21)."""
    for step, wanted in table.items():
        found = learning_rate_factor(step, warmup_steps, total_steps, min_lr_ratio, lr_decay)
        assert found == pytest.approx(wanted, abs=1e-12), step  # double precision has 16 digits


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1, 0.3])
def test_the_constant_part_does_not_know_where_the_run_ends(min_lr_ratio):
    """Catches a factor that is 1 up to rounding only: a prolonged run would differ in the last bit."""
    for step in range(100, 801):
        assert learning_rate_factor(step, 100, 1001, min_lr_ratio, "wsd") == 1.0
        assert learning_rate_factor(step, 100, 7919, min_lr_ratio, "wsd") == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_are_peaks_times_the_factor(name):
    """Catches a factor that is applied to the last learning rate instead of the peak, and a group left out."""
    config = OptimizerConfig(name=name, learning_rate=0.01, muon_learning_rate=0.5)
    optimizer = create_optimizer(make_model(), config)
    peaks = [0.5 if name == "muon" else 0.01, 0.01]  # matrices, others
    for factor in (0.5, 0.5, 0.1, 1.0):
        set_learning_rate(optimizer, factor)
        # The same product of two doubles on both sides.
        assert [group["lr"] for group in optimizer.param_groups] == [peak * factor for peak in peaks]


# --- Groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_in_exactly_one_group(name, bias):
    """Catches a parameter in both groups or in neither, and decay of biases, norms and embeddings (row 18)."""
    model = make_model(bias=bias)
    optimizer = create_optimizer(model, OptimizerConfig(name=name, weight_decay=0.3))
    decay_of = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert id(p) not in decay_of  # by identity: equal numbers don't make two parameters one
            decay_of[id(p)] = group["weight_decay"]
    found = {key: decay_of.pop(id(p)) for key, p in model.named_parameters()}
    assert found == {key: 0.3 if is_matrix(key) else 0.0 for key, _ in model.named_parameters()}
    assert decay_of == {}
    assert sum(is_matrix(key) for key in found) == 8  # four in each of two blocks
    assert found["wte.weight"] == 0.0  # which is the head as well


def test_untied_head_and_other_shapes_decay_by_their_meaning():
    """Catches groups that are made from the names of one model: what counts is whether activations are multiplied."""

    class Untied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.twice = nn.Linear(4, 4)
            self.again = self.twice  # two names, one module
            self.head = nn.Linear(4, 5)
            self.scale = nn.Parameter(torch.ones(4))

    model = Untied()
    optimizer = create_optimizer(model, OptimizerConfig(name="adamw", weight_decay=0.3))
    groups = {group["weight_decay"]: {id(p) for p in group["params"]} for group in optimizer.param_groups}
    assert groups == {
        0.3: {id(model.twice.weight), id(model.head.weight)},
        0.0: {id(model.table.weight), id(model.twice.bias), id(model.head.bias), id(model.scale)},
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", ["wte.", "h.0.", "h.", "ln_"])
def test_frozen_parameters_are_in_no_group(name, frozen):
    """Catches weight decay that moves what the user froze (row 18)."""
    model = make_model()
    for key, p in model.named_parameters():
        p.requires_grad = frozen not in key
    optimizer = create_optimizer(model, OptimizerConfig(name=name))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    take_steps(model, optimizer, [1])
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == (not p.requires_grad), key


@pytest.mark.parametrize("name", NAMES)
def test_layer_decay_slows_what_lies_below(name):
    """Catches decay from the wrong end, a layer left out, and rates that the schedule doesn't reach."""
    config = OptimizerConfig(name=name, learning_rate=0.1, muon_learning_rate=0.2, layer_decay=0.5)
    model = make_model(n_layer=12)  # a block's number may have two digits
    optimizer = create_optimizer(model, config)
    set_learning_rate(optimizer, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for key, p in model.named_parameters():
        layer = {"wte": 0, "wpe": 0, "ln_f": 13}.get(key.split(".")[0])
        layer = int(key.split(".")[1]) + 1 if layer is None else layer
        peak = 0.2 if is_matrix(key) and name == "muon" else 0.1
        assert rates[id(p)] == peak * 0.5**13 / 0.5**layer * 0.5, key  # powers of two: exact
    assert optimizer.param_groups[-1]["lr"] == 0.1 * 0.5  # the last group's is the one that is reported
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    take_steps(model, optimizer, [1])
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters())
    # The state is the parameters', and not the groups': layer decay can be switched off in mid-run.
    parameters = dict(model.named_parameters())
    flat = create_optimizer(model, OptimizerConfig(name=name))
    load_optimizer_state(flat, parameters, through_a_file(optimizer_state(optimizer, parameters)))
    for p in parameters.values():
        assert all(torch.equal(flat.state[p][key], value) for key, value in optimizer.state[p].items())


# --- Steps -----------------------------------------------------------------------------------------------------------


def test_adamw_equals_its_formula():
    """Catches decay coupled to the gradient, no bias correction, and betas or decay that never arrive."""
    lr, decay, beta1, beta2, eps = 0.01, 0.3, 0.8, 0.9, 1e-8
    model = make_model()
    config = OptimizerConfig(name="adamw", learning_rate=lr, weight_decay=decay, betas=(beta1, beta2))
    optimizer = create_optimizer(model, config)
    wanted = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    m = {key: torch.zeros_like(p) for key, p in wanted.items()}
    v = {key: torch.zeros_like(p) for key, p in wanted.items()}
    for t in (1, 2):
        set_gradients(model, seed=t)
        optimizer.step()
        for key, p in model.named_parameters():
            # Loshchilov and Hutter (1711.05101), algorithm 2, in float64.
            g = p.grad.double()
            m[key] = beta1 * m[key] + (1 - beta1) * g
            v[key] = beta2 * v[key] + (1 - beta2) * g**2
            direction = (m[key] / (1 - beta1**t)) / ((v[key] / (1 - beta2**t)).sqrt() + eps)
            wanted[key] = wanted[key] - lr * (decay if is_matrix(key) else 0.0) * wanted[key] - lr * direction
            # Numbers up to 1 in float32: rounding is 1e-7. A mistake in any term changes 1e-5 and more.
            torch.testing.assert_close(p.double(), wanted[key], rtol=0, atol=1e-6)


def test_muon_steps_matrices_by_muon_and_the_rest_by_adamw():
    """Catches embeddings in Muon, a part that isn't stepped, and learning rates or decay in the wrong part."""
    config = OptimizerConfig(
        name="muon", learning_rate=0.01, muon_learning_rate=0.05, weight_decay=0.3, betas=(0.8, 0.9)
    )
    model, twin = make_model(), make_model()
    optimizer = create_optimizer(model, config, torch.bfloat16)
    others = [p for key, p in twin.named_parameters() if not is_matrix(key)]
    # Queries, keys and values are matrices of their own: three parameters that share the memory of one.
    whole = [p for key, p in twin.named_parameters() if is_matrix(key)]
    parts = [p.detach().split(16) if p.shape == (48, 16) else [p.detach()] for p in whole]
    matrices = [nn.Parameter(piece) for pieces in parts for piece in pieces]
    references = [
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.3, momentum=0.9, ns_steps=4),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.0, betas=(0.8, 0.9)),
    ]
    for seed, factor in ((1, 1.0), (2, 0.5)):  # equal gradients would hide the betas
        set_learning_rate(optimizer, factor)
        for reference, peak in zip(references, (0.05, 0.01), strict=True):
            reference.param_groups[0]["lr"] = peak * factor
        take_steps(model, optimizer, [seed])
        set_gradients(twin, seed)
        for p, pieces in zip(whole, parts, strict=True):
            for piece, gradient in zip(pieces, p.grad.split(len(pieces[0])), strict=True):
                next(m for m in matrices if m.data_ptr() == piece.data_ptr()).grad = gradient
        for reference in references:
            reference.step()
        for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            # Batched products round differently in bfloat16 (2^-9 of entries below 1, in steps of 0.05 and 0.025);
            # AdamW's fused kernel rounds once where the loop over tensors rounds twice.
            torch.testing.assert_close(p, q, rtol=0, atol=1e-3 if is_matrix(key) else 1e-6, msg=key)


def test_bfloat16_is_what_muon_computes_in():
    """Catches a type that never arrives at the products: twice the time, and nobody notices."""
    models = [make_model(), make_model()]
    for model, dtype in zip(models, (torch.float32, torch.bfloat16), strict=True):
        take_steps(model, create_optimizer(model, OptimizerConfig(name="muon"), dtype), [1])
    for (key, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q) != is_matrix(key), key
        # Entries of the update are below 1, with 8 bits, in a step of 0.03.
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_zero_moves_nothing(name):
    """Catches a part that keeps a learning rate of its own: the schedule would not reach it."""
    model, before = make_model(), make_model()
    optimizer = create_optimizer(model, OptimizerConfig(name=name))
    set_learning_rate(optimizer, 0.0)
    take_steps(model, optimizer, [1, 2])
    assert_same(model, before)


@pytest.mark.parametrize("name", NAMES)
def test_zero_grad_reaches_every_parameter(name):
    """Catches a part whose gradients pile up from step to step."""
    model = make_model()
    optimizer = create_optimizer(model, OptimizerConfig(name=name))
    set_gradients(model, 1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["wte.weight", "h.1.mlp.c_fc.weight", "ln_f.bias"])
def test_overflow_skips_the_whole_step(name, where):
    """Catches a float16 overflow in one part after which the other part steps all the same."""
    model, untouched, twin = make_model(), make_model(), make_model()
    config = OptimizerConfig(name=name)
    optimizer, twins_optimizer = create_optimizer(model, config), create_optimizer(twin, config)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled_step(seed):
        scaler.scale(torch.tensor(1.0))  # the scaler makes its tensors at the first scaling
        set_gradients(model, seed)
        for p in model.parameters():
            p.grad *= scaler.get_scale()
        if seed == 0:
            dict(model.named_parameters())[where].grad.flatten()[0] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    scaled_step(0)
    assert_same(model, untouched)
    assert scaler.get_scale() == 2.0
    # Nothing of the overflow stays behind: the next steps are those of an optimizer that never saw it. Scaling by a
    # power of two is exact, so the results are equal to the bit.
    scaled_step(1)
    scaled_step(2)
    take_steps(twin, twins_optimizer, [1, 2])
    assert_same(model, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_zeros_moves_nothing(dtype):
    """Catches 0 / 0: a matrix whose gradient is all zeros, as of a layer that isn't used, would become NaN."""
    model = make_model()
    optimizer = create_optimizer(model, OptimizerConfig(name="muon", weight_decay=0.0), dtype)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    set_gradients(model, 1)
    for key, p in model.named_parameters():
        if key.startswith("h.0."):  # the other block's matrices are orthogonalized beside these
            p.grad.zero_()
    optimizer.step()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key]) == key.startswith("h.0."), key
        assert p.isfinite().all(), key


def test_small_gradients_count_as_much_as_large_ones():
    """Catches a lower limit on the norm that is there to save zeros, and weakens small gradients as well."""
    matrices = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    for scale in (1e-5, 1e5):
        found = orthogonalize(matrices * scale, torch.float32, 4)
        # The norm is divided out: only the rounding of the product stays, 1e-7 times slopes up to 141.
        torch.testing.assert_close(found, orthogonalize(matrices, torch.float32, 4), rtol=0, atol=1e-4)
        assert found.dtype == orthogonalize(matrices, torch.bfloat16, 4).dtype == torch.float32


# --- Saving and loading ----------------------------------------------------------------------------------------------


def through_a_file(state):
    """What comes back from a snapshot."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def carry_over(old, new, old_model, new_model):
    """Bring an optimizer's state to another one as a snapshot does: by the parameters' names, through a file."""
    state = through_a_file(optimizer_state(old, dict(old_model.named_parameters())))
    load_optimizer_state(new, dict(new_model.named_parameters()), state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "load", [carry_over, lambda old, new, *models: new.load_state_dict(through_a_file(old.state_dict()))]
)
def test_saved_state_continues_to_the_bit(name, load):
    """Catches moments, momentum or step counts that aren't saved, and state that lands at another parameter."""
    config = OptimizerConfig(name=name)
    model = make_model()
    optimizer = create_optimizer(model, config)
    set_learning_rate(optimizer, 0.7)
    take_steps(model, optimizer, [1, 2])

    resumed = make_model(seed=1)
    resumed.load_state_dict(through_a_file(model.state_dict()))
    resumed_optimizer = create_optimizer(resumed, config)
    load(optimizer, resumed_optimizer, model, resumed)
    for factor in (0.7, 0.3):  # the schedule must reach both parts after loading, too
        set_learning_rate(optimizer, factor)
        set_learning_rate(resumed_optimizer, factor)
        take_steps(model, optimizer, [3])
        take_steps(resumed, resumed_optimizer, [3])
        assert_same(model, resumed)


@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_zero_moves_nothing_after_loading(name):
    """Catches groups that are replaced by loading, so that the schedule sets learning rates nobody reads."""
    model = make_model()
    optimizer = create_optimizer(model, OptimizerConfig(name=name))
    take_steps(model, optimizer, [1])
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    set_learning_rate(optimizer, 0.0)
    before = make_model(seed=1)
    before.load_state_dict(model.state_dict())
    take_steps(model, optimizer, [2])
    assert_same(model, before)


def moments(optimizer):
    """All tensors of an optimizer's state, in order."""
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p][key] for p in in_order for key in sorted(optimizer.state[p])]


@pytest.mark.parametrize("name", NAMES)
def test_configuration_wins_over_the_saved_state(name):
    """Catches a resumed optimizer that keeps its old learning rate, decay and betas (row 22)."""
    model = make_model()
    saved = create_optimizer(
        model,
        OptimizerConfig(name=name, learning_rate=0.01, muon_learning_rate=0.1, weight_decay=0.1, betas=(0.9, 0.95)),
    )
    set_learning_rate(saved, 0.5)
    take_steps(model, saved, [1, 2])

    config = OptimizerConfig(
        name=name, learning_rate=0.003, muon_learning_rate=0.03, weight_decay=0.2, betas=(0.7, 0.8)
    )
    optimizer = create_optimizer(model, config)
    carry_over(saved, optimizer, model, model)
    assert all(torch.equal(a, b) for a, b in zip(moments(optimizer), moments(saved), strict=True))

    peaks = [0.03 if name == "muon" else 0.003, 0.003]
    assert [group["lr"] for group in optimizer.param_groups] == peaks
    assert [group["initial_lr"] for group in optimizer.param_groups] == peaks
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert {group["betas"] for group in optimizer.param_groups if "betas" in group} == {(0.7, 0.8)}

    # And the numbers are those that step: as an optimizer of the new configuration whose moments were put in by hand.
    twin = make_model(seed=1)
    twin.load_state_dict(model.state_dict())
    by_hand = create_optimizer(twin, config)
    ours, theirs = (getattr(o, "parts", {"": o}).values() for o in (by_hand, saved))
    for part, source in zip(ours, theirs, strict=True):
        targets = [p for group in part.param_groups for p in group["params"]]
        sources = [p for group in source.param_groups for p in group["params"]]
        for p, q in zip(targets, sources, strict=True):
            part.state[p] = {key: value.clone() for key, value in source.state[q].items()}
    for o in (optimizer, by_hand):
        set_learning_rate(o, 0.5)
    take_steps(model, optimizer, [3])
    take_steps(twin, by_hand, [3])
    assert_same(model, twin)


def test_settings_of_older_programs_do_not_come_back(monkeypatch):
    """Catches five Newton-Schulz steps, which an older program has saved, where the present one does four."""
    model = make_model()
    optimizer = create_optimizer(model, OptimizerConfig(name="muon"))
    done = []
    original = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda m, t, n: done.append(n) or original(m, t, n))
    take_steps(model, optimizer, [1])
    older = create_optimizer(model, OptimizerConfig(name="muon"))
    older.param_groups[0].update(ns_steps=5, nesterov=True)  # as the first version of this program had them
    carry_over(optimizer, older, model, model)
    carry_over(older, optimizer, model, model)
    take_steps(model, optimizer, [2])
    assert set(done) == {4}
    assert "nesterov" not in optimizer.param_groups[0]


def test_muon_goes_on_from_a_state_that_is_empty():
    """Catches a crash where every step so far was left out, as float16's first ones can be: there's no momentum yet."""
    model, twin = make_model(), make_model()
    optimizer, fresh = (create_optimizer(m, OptimizerConfig(name="muon")) for m in (model, twin))
    carry_over(fresh, optimizer, twin, model)
    take_steps(model, optimizer, [1])
    take_steps(twin, fresh, [1])
    assert_same(model, twin)


def test_muon_makes_its_state_once(monkeypatch):
    """Catches memory for all momenta that is allocated and set to zero in every step."""
    model = make_model()
    made = []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda p, **options: made.append(p.shape) or zeros_like(p, **options))
    optimizer = create_optimizer(model, OptimizerConfig(name="muon"))
    take_steps(model, optimizer, [1])
    first = len(made)
    take_steps(model, optimizer, [2, 3])
    assert len(made) == first > 0


def step_as_rank(rank, folder):
    """What rank `rank` of 1, 2 and of 3 has after three steps of Muon: weights, state, and how much it multiplied."""
    original, sizes = orthogonalize, []
    muon.orthogonalize = lambda m, *options: sizes.append(len(m)) or original(m, *options)
    torch.set_num_threads(1)  # as conftest.py says to the reference
    for world_size in (2, 3):
        if rank >= world_size:
            continue
        store = dist.FileStore(f"{folder}/store{world_size}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        model = make_model(n_layer=4)
        optimizer = create_optimizer(model, OptimizerConfig(), rank=rank, world_size=world_size)
        sizes.clear()
        take_steps(model, optimizer, [1, 2, 3])
        result = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sizes": sizes}
        torch.save(result, f"{folder}/{world_size}-{rank}.pt")
        dist.destroy_process_group()


def test_shared_out_products_are_those_of_one_rank(tmp_path):
    """Catches ranks that all multiply everything, pieces in a wrong order, padding that counts, and state by rank."""
    spawn(step_as_rank, 3, str(tmp_path))
    model = make_model(n_layer=4)
    optimizer = create_optimizer(model, OptimizerConfig())
    take_steps(model, optimizer, [1, 2, 3])
    # Of three shapes there are 4 matrices, of one 3 x 4; three ranks take 2, 2 and 0 of four, in padding 2 as well.
    shares = {2: [6, 2, 2, 2], 3: [4, 2, 2, 2]}
    for world_size, rank in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
        there = torch.load(tmp_path / f"{world_size}-{rank}.pt", weights_only=True)
        assert there["sizes"] == shares[world_size] * 3
        for name, weight in model.state_dict().items():
            assert torch.equal(there["model"][name], weight), name
        here = optimizer.state_dict()
        assert here["param_groups"] == there["optimizer"]["param_groups"]
        for key, state in here["state"].items():
            assert state.keys() == there["optimizer"]["state"][key].keys()
            for name, value in state.items():
                assert torch.equal(value, there["optimizer"]["state"][key][name])


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24)])
def test_orthogonalize_changes_the_singular_values_alone(shape):
    """Catches wrong coefficients, rounds or transpositions: the reference applies the polynomial to an SVD."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(4):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    expected = u @ torch.diag_embed(s) @ v
    # float32 against float64, with slopes up to 3.4445^4 = 141: 141 * 6e-8 is 1e-5.
    torch.testing.assert_close(orthogonalize(matrices, torch.float32, 4).double(), expected, rtol=0, atol=1e-4)
    # bfloat16 has 8 bits; the values stay near 1.
    assert (orthogonalize(matrices, torch.bfloat16, 4) - expected).abs().max() < 0.05
