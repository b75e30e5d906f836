"""The GPT: each test names the mistake that would turn it red. References are explicit formulas and Hugging Face."""

import math

import pytest
import torch
from torch import nn

from config import MODEL_TYPES, ArchitectureConfig, complete
from model import GPT, CausalSelfAttention, GPTConfig, fast_attention, fast_gelu
from sampling import Sampling, choose_token

V, T, C = 17, 12, 32  # vocab_size, block_size, n_embd of most models here


def make_model(seed=0, std=0.25, **changes):
    """A model in evaluation mode whose every number is drawn, biases too, and large enough to tell mistakes apart.

    Fresh weights are so small that attention is nearly uniform and GELU nearly linear: much would go unnoticed.
    """
    sizes = {"vocab_size": V, "block_size": T, "n_layer": 2, "n_head": 4, "n_embd": C, **changes}
    model = GPT(GPTConfig(**sizes)).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            p.copy_(center + std * torch.randn(p.shape, generator=random))
    return model


def tokens(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


# --- Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "no model_type"),
        ({"n_layer": 2, "n_head": 2}, "no model_type.*'n_embd': None"),
        ({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8}, "both model_type=gpt2 and"),
        ({"model_type": "gpt2", "n_layer": 2}, "both model_type=gpt2 and"),
        ({"model_type": "gpt3"}, "model_type=gpt3.*gpt-nano"),
        ({"n_layer": 2, "n_head": 3, "n_embd": 8}, "n_embd=8 is not divisible by n_head=3"),
        ({"n_layer": 0, "n_head": 2, "n_embd": 8}, "n_layer=0"),
        ({"n_layer": 1, "n_head": -2, "n_embd": 8}, "n_head=-2"),
        ({"n_layer": 1, "n_head": 2, "n_embd": 0}, "n_embd=0"),
        ({"model_type": "gpt2", "embd_pdrop": 1.0}, r"embd_pdrop=1\.0"),
        ({"model_type": "gpt2", "resid_pdrop": -0.1}, r"resid_pdrop=-0\.1"),
        ({"model_type": "gpt2", "attn_pdrop": float("nan")}, "attn_pdrop=nan"),
    ],
)
def test_contradictory_configuration_is_refused(choice, message):
    """Catches a default that hides a missing size, and a name that silently overrides explicit sizes (row 7)."""
    with pytest.raises(ValueError, match=f"^gpt_config[^\n]*{message}[^\n]*$"):
        ArchitectureConfig(**choice)
    if "model_type" not in choice and len(choice) == 3:
        with pytest.raises(ValueError, match=f"^gpt_config[^\n]*{message}[^\n]*$"):
            GPTConfig(vocab_size=V, block_size=T, **choice)


def test_both_configurations_have_the_same_defaults():
    """Catches a model built in Python that differs from the one that the configuration file describes."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8}
    assert complete(ArchitectureConfig(**sizes), V, T) == GPTConfig(vocab_size=V, block_size=T, **sizes)


@pytest.mark.parametrize("missing", ["vocab_size", "block_size", "n_layer", "n_head", "n_embd"])
def test_what_the_data_dictates_has_no_default(missing):
    """Catches a None default for a required size (row 7)."""
    sizes = {"vocab_size": V, "block_size": T, "n_layer": 2, "n_head": 2, "n_embd": 8}
    del sizes[missing]
    with pytest.raises(TypeError, match=missing):
        GPTConfig(**sizes)


def test_table_of_names_is_the_published_one():
    """Catches a slip of the pen in the table: the sizes are written out here a second time."""
    sizes = """openai-gpt 12 12 768, gpt2 12 12 768, gpt2-medium 24 16 1024, gpt2-large 36 20 1280, gpt2-xl 48 25 1600,
        gopher-44m 8 16 512, gpt-mini 6 6 192, gpt-micro 4 4 128, gpt-nano 3 3 48"""
    rows = [row.split() for row in sizes.split(",")]
    assert {name: tuple(map(int, numbers)) for name, *numbers in rows} == MODEL_TYPES
    config = complete(ArchitectureConfig(model_type="gpt2-large"), V, T)
    assert (config.n_layer, config.n_head, config.n_embd) == (36, 20, 1280)
    assert GPTConfig(**vars(config)) == config  # as a snapshot stores it


# --- Parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_parameter_names_and_shapes(bias):
    """Catches a second output projection (row 2), an untied head, and biases that stay with bias=False."""
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for block in ("h.0.", "h.1."):
        shapes |= {
            block + "ln_1.weight": (C,),
            block + "ln_1.bias": (C,),
            block + "attn.c_attn.weight": (3 * C, C),
            block + "attn.c_attn.bias": (3 * C,),
            block + "attn.c_proj.weight": (C, C),
            block + "attn.c_proj.bias": (C,),
            block + "ln_2.weight": (C,),
            block + "ln_2.bias": (C,),
            block + "mlp.c_fc.weight": (4 * C, C),
            block + "mlp.c_fc.bias": (4 * C,),
            block + "mlp.c_proj.weight": (C, 4 * C),
            block + "mlp.c_proj.bias": (C,),
        }
    if not bias:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("bias")}
    model = make_model(bias=bias)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    assert model.num_parameters() == sum(math.prod(shape) for shape in shapes.values())
    logits, loss = model(tokens(2, T), tokens(2, T, seed=1))
    assert torch.isfinite(logits).all()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())  # every parameter takes part


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_parameter_counts_are_those_of_the_released_models(name, published):
    """Catches a missing or an additional matrix: the counts are those of the checkpoints that OpenAI released."""
    with torch.device("meta"):  # shapes without memory
        assert GPT(complete(ArchitectureConfig(model_type=name), 50257, 1024)).num_parameters() == published


def test_head_is_the_embedding():
    """Catches a head that is a copy: it would be trained apart from the embedding."""
    model = make_model()
    assert model.lm_head.weight is model.wte.weight
    assert model.lm_head.bias is None


def test_no_buffers():
    """Catches a mask kept as a buffer (row 6), which ties snapshots to block_size."""
    model = make_model()
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}


def test_initial_standard_deviations():
    """Catches a scaled initialisation that misses one of the residual projections, or hits more than them (row 3)."""
    torch.manual_seed(0)
    n_layer = 4
    model = GPT(GPTConfig(vocab_size=64, block_size=32, n_layer=n_layer, n_head=2, n_embd=C))
    residual = {f"h.{i}.{branch}.c_proj.weight" for i in range(n_layer) for branch in ("attn", "mlp")}
    assert residual <= {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            wanted = 0.02 / math.sqrt(2 * n_layer) if name in residual else 0.02
            # The deviation of 1024 draws, the fewest here, is known to 2.2 %; the mistakes are off by a factor of 2.8.
            assert p.std().item() == pytest.approx(wanted, rel=0.1), name
            assert abs(p.mean().item()) < 0.2 * wanted, name


def test_initial_loss_is_that_of_guessing():
    """Catches an initialisation that starts with opinions: far above ln V, the first steps only unlearn them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=65, block_size=32, n_layer=2, n_head=2, n_embd=C))
    idx = torch.randint(65, (8, 33))
    loss = model(idx[:, :-1], idx[:, 1:])[1].item()
    # Logits have a deviation of about 0.02 √C = 0.11: half its square above ln V, and as much again for the draw.
    assert loss == pytest.approx(math.log(65), abs=0.03)


# --- Attention -------------------------------------------------------------------------------------------------------


def explicit_attention(attention, x):
    """Softmax attention written out, head by head, with a mask of its own: the reference for the fused one."""
    _, T, C = x.shape
    hs = C // attention.n_head
    q, k, v = (x @ attention.c_attn.weight.T + attention.c_attn.bias).split(C, dim=2)
    is_later = torch.tensor([[key > query for key in range(T)] for query in range(T)])
    heads = []
    for h in range(0, C, hs):
        scores = q[..., h : h + hs] @ k[..., h : h + hs].transpose(1, 2) / math.sqrt(hs)  # (B, T, T)
        weights = torch.softmax(scores.masked_fill(is_later, -math.inf), dim=-1)
        heads.append(weights @ v[..., h : h + hs])
    return torch.cat(heads, dim=2) @ attention.c_proj.weight.T + attention.c_proj.bias


@pytest.mark.parametrize("length", [1, 2, T])
@pytest.mark.parametrize("n_head", [1, 4])
def test_attention_equals_an_explicit_softmax(length, n_head):
    """Catches a mask that is added instead of hiding (row 1), a missing scale, and heads cut along the wrong axis."""
    attention = make_model(n_head=n_head).h[0].attn
    assert isinstance(attention, CausalSelfAttention)
    x = torch.randn(3, length, C, generator=torch.Generator().manual_seed(1))
    # Outputs below 10 in float32, sums of at most 32 products: rounding stays near 1e-6.
    torch.testing.assert_close(attention(x), explicit_attention(attention, x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("training", [False, True])
def test_no_token_changes_what_is_before_it(training):
    """Catches any leak from the future (row 1), such as a float mask: bit-identical, for every token."""
    model = make_model().train(training)  # dropout is 0: only the code path can differ
    idx = tokens(2, T)
    logits, _ = model(idx)
    for t in range(T):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        changed_logits, _ = model(changed)
        assert torch.equal(changed_logits[:, :t], logits[:, :t])
        for later in range(t, T):  # and what comes later does see it
            assert not torch.equal(changed_logits[:, later], logits[:, later])


def test_single_query_sees_all_cached_keys():
    """Catches is_causal=True with a cache (row 4): the mask's corner is top left, so the query would see key 0 only."""
    attention = make_model().h[0].attn
    x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(2))
    wanted = explicit_attention(attention, x)
    # Whatever isn't filled yet is NaN: reading it would show.
    cache = torch.full((2, 2, attention.n_head, T, C // attention.n_head), math.nan)
    with torch.no_grad():
        outputs = [attention(x[:, :3], cache, 0)] + [attention(x[:, t : t + 1], cache, t) for t in range(3, T)]
    # The same rounding as in the test of the uncached attention.
    torch.testing.assert_close(torch.cat(outputs, dim=1), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prefill", [1, 5, T])
def test_cached_logits_equal_uncached_ones(prefill):
    """Catches positions that start again at 0, and a layer that uses another layer's cache."""
    model, idx = make_model(n_layer=3), tokens(2, T)
    wanted, _ = model(idx)
    cache = model.new_cache(2)
    with torch.no_grad():
        states = [model.hidden_states(idx[:, :prefill], cache, 0)]
        states += [model.hidden_states(idx[:, t : t + 1], cache, t) for t in range(prefill, T)]
        logits = model.lm_head(torch.cat(states, dim=1))
    # Logits below 10 in float32, summed up in another order: rounding stays near 3e-6.
    torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-5)


def test_other_shapes_are_refused():
    """Catches several tokens on a filled cache, whose mask would be wrong (row 4), and positions beyond the table."""
    model = make_model()
    cache = model.new_cache(1)
    with torch.no_grad():
        model.hidden_states(tokens(1, 3), cache, 0)
        with pytest.raises(ValueError, match="got 2 tokens on top of 3 cached"):
            model.hidden_states(tokens(1, 2), cache, 3)
        with pytest.raises(ValueError, match=f"got {T + 1} tokens.*block_size={T}"):
            model.hidden_states(tokens(1, 1), cache, T)
    with pytest.raises(ValueError, match=f"got {T + 1} tokens.*block_size={T}"):
        model(tokens(1, T + 1))


@pytest.mark.parametrize("where", ["embd_pdrop", "resid_pdrop", "attn_pdrop"])
def test_dropout_is_off_in_evaluation_and_on_in_training(where):
    """Catches dropout_p that ignores eval() (row 5), in evaluation as in generation, and a dropout that is never on."""
    without, model, idx = make_model(), make_model(**{where: 0.5}), tokens(2, T)
    wanted, _ = without(idx)
    for _ in range(3):
        assert torch.equal(model(idx)[0], wanted)
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(idx)[0], wanted)
    assert not torch.equal(model(idx)[0], model(idx)[0])
    assert torch.equal(model.generate(idx, 20), without.generate(idx, 20))  # evaluation mode all by itself


@pytest.mark.parametrize("branch", ["attn", "mlp"])
def test_both_branches_drop_out_at_their_end(branch):
    """Catches resid_pdrop that reaches one of the two branches only."""
    part = getattr(make_model(resid_pdrop=0.5).train().h[0], branch)
    torch.manual_seed(0)
    out = part(torch.randn(8, T, C))
    # Of 3,072 numbers: 0.1 is 11 deviations.
    assert (out == 0).double().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("length", [T, 600])  # the second one takes the way of long windows
def test_attention_under_autocast_on_a_cpu_is_the_same_function(length):
    """Catches a mask that leaks, a lost scale or dropout, a wrong gradient, and a result of another type than q."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 8, generator=random).bfloat16().requires_grad_() for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / math.sqrt(8)
    is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
    wanted = torch.softmax(scores.masked_fill(is_later, -math.inf), dim=-1) @ exact[2]
    wanted.sin().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        found = fast_attention(q, k, v, 0.0, is_causal=True)
        single = fast_attention(q[:, :, -1:], k.float(), v.float(), 0.0, is_causal=False)  # a cache is float32
        torch.manual_seed(0)
        dropped = fast_attention(q, k, v, 0.9, is_causal=True)
        found.sin().sum().backward()
        later = torch.arange(length)[:, None] == length - 1
        changed = fast_attention(q, *(x.masked_fill(later, 9.0) for x in (k, v)), 0.0, is_causal=True)
    assert found.dtype == single.dtype == torch.bfloat16
    # 8 bits in each of four steps: below a hundredth; without the scale or the mask, some tenths.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.02)
    torch.testing.assert_close(single, found[:, :, -1:], rtol=0, atol=0.02)
    for x, reference in zip((q, k, v), exact, strict=True):
        assert (x.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()
    assert torch.equal(changed[:, :, :-1], found[:, :, :-1])  # to the bit: nobody sees what comes later
    assert not torch.equal(dropped, found)


# --- The whole function ----------------------------------------------------------------------------------------------


def test_gelu_under_autocast_is_as_good_as_bfloat16():
    """Catches the other form in float32, where it would be seen, the slow one under autocast, and a third."""
    x = torch.linspace(-6, 6, 2001).to(torch.bfloat16)
    reference = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert torch.equal(fast_gelu(x.float()), torch.nn.functional.gelu(x.float(), approximate="tanh"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast_gelu(x), torch.nn.functional.gelu(x))
        error = (fast_gelu(x).double() - reference).abs()
    assert (error <= 5e-4 + reference.abs() / 256).all()  # bfloat16 has 8 bits


def test_logits_are_those_of_hugging_face():
    """Catches the exact GELU in place of its tanh form, post-norm, another epsilon, and another order in c_attn."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=T,
        n_embd=C,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=3, n_head=4, n_embd=C)).eval()
    random = torch.Generator().manual_seed(0)
    their_parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for p in their_parameters.values():
            # Large enough that the exact GELU differs by 3e-4, small enough that float32 rounding stays near 1e-6.
            p.add_(0.1 * torch.randn(p.shape, generator=random))
        for name, p in ours.named_parameters():
            source = their_parameters.pop(f"transformer.{name}")
            # Their Conv1D holds the transpose of a Linear's matrix.
            p.copy_(source.T if p.ndim == 2 and name.startswith("h.") else source)
        assert their_parameters == {}  # nothing of theirs is without a counterpart
        idx = tokens(4, T)
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, rtol=0, atol=1e-5)


def test_shapes_and_types():
    """Catches a loss per token, logits of the last position only, and a loss where none was asked for."""
    model = make_model()
    for length in (1, 5, T):
        logits, loss = model(tokens(3, length))
        assert logits.shape == (3, length, V)
        assert loss is None
    logits, loss = model(tokens(3, T), tokens(3, T, seed=1))
    assert logits.shape == (3, T, V)
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_loss_is_the_mean_over_targets_that_count():
    """Catches targets of -1 that are scored, or that count in the denominator, and bits in place of nats."""
    model, idx, targets = make_model(), tokens(3, T), tokens(3, T, seed=1)
    targets[0, 4:] = -1
    targets[2, 0] = -1
    logits, loss = model(idx, targets)
    surprises = [
        -math.log(torch.softmax(logits[b, t].double(), dim=0)[targets[b, t]].item())
        for b in range(3)
        for t in range(T)
        if targets[b, t] != -1
    ]
    assert len(surprises) == 3 * T - 9
    # float32 has 7 digits; the mean is below 100.
    assert loss.item() == pytest.approx(sum(surprises) / len(surprises), rel=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.05)])
def test_model_can_be_converted_to_another_type(dtype, tolerance):
    """Catches attention that returns another type than it was given: the next projection refuses it."""
    model, idx = make_model(std=0.05), tokens(2, T)
    wanted, _ = model(idx)
    logits, _ = model.to(dtype)(idx)
    assert logits.dtype == dtype
    assert model(idx, idx)[1].dtype == torch.float32  # 16 bits are too few to sum up the losses
    # Logits are below 1. Attention may compute in float32, whose rounding is near 1e-6; bfloat16's is near 0.005.
    torch.testing.assert_close(logits.float(), wanted, rtol=0, atol=tolerance)


# --- Generation ------------------------------------------------------------------------------------------------------


def uncached_greedy(model, idx, max_new_tokens):
    """The rule of generation, without a cache: a context that exceeds block_size is cut to its last half."""
    block_size, context = model.config.block_size, idx
    for _ in range(max_new_tokens):
        if context.size(1) > block_size:
            context = context[:, context.size(1) - max(1, block_size // 2) :]
        token = model(context)[0][:, -1].argmax(dim=-1, keepdim=True)
        context, idx = torch.cat((context, token), dim=1), torch.cat((idx, token), dim=1)
    return idx


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("prompt", [1, 4, 30], ids=lambda length: f"prompt{length}")
def test_greedy_text_equals_that_of_an_uncached_loop(block_size, prompt):
    """Catches wrong positions or stale keys after the context was cut (row 37), near and far past block_size."""
    model = make_model(std=0.4, block_size=block_size)
    idx = tokens(3, prompt)
    text = model.generate(idx, 4 * block_size + 3)
    # Equal tokens in spite of rounding: the best two logits differ by 2e-3 or more, rounding makes 1e-5.
    assert torch.equal(text, uncached_greedy(model, idx, 4 * block_size + 3))
    assert torch.equal(text[:, :prompt], idx)


def test_text_depends_on_what_came_before():
    """Catches a model of these tests that repeats one token whatever it reads: the test above would be empty."""
    texts = make_model(std=0.4).generate(tokens(3, 4), 40)[:, 4:]
    assert all(len(set(text.tolist())) >= 4 for text in texts)
    assert len({tuple(text.tolist()) for text in texts}) == 3


def test_a_token_costs_one_position():
    """Catches the whole context computed again for every token (row 37)."""
    model, lengths = make_model(block_size=8), []
    model.h[0].register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].size(1)))
    model.generate(tokens(1, 3), 16)
    # 3 to 8 tokens fit. The 9th cuts the context to 4 tokens, and so on with every fifth token.
    assert lengths == [3, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "do_sample": True},
        {"temperature": 0.0, "do_sample": True, "top_k": 3, "top_p": 0.5},
        {"temperature": 1e-30, "do_sample": True},
        {"temperature": 5.0},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "top_p": 1e-6},
        {"do_sample": True, "top_k": 1, "top_p": 1.0, "temperature": 3.0},
    ],
    ids=str,
)
def test_limits_that_are_greedy(parameters):
    """Catches a division by temperature 0, and filters that keep a token too many or none (row 35)."""
    model, idx = make_model(), tokens(3, 4)
    assert torch.equal(model.generate(idx, 25, **parameters), model.generate(idx, 25))


def test_temperature_below_float32_is_greedy():
    """Catches 0 / 0: a positive temperature that float32 rounds to 0 makes every probability NaN."""
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    assert choose_token(logits, Sampling(1e-50, True)).tolist() == [[1]]


def test_a_low_temperature_is_not_greedy_yet():
    """Catches a threshold for greedy that is too high: at 0.0005 a token that is nearly as likely is drawn, too."""
    logits = torch.tensor([[0.0, -0.0002]]).expand(1000, -1)
    draws = choose_token(logits, Sampling(5e-4, True), torch.Generator().manual_seed(0))
    # exp(-0.4) = 0.67 to 1: 0.40 of the draws, with a deviation of 0.016.
    assert draws.double().mean() == pytest.approx(0.4, abs=0.08)


def test_equally_likely_tokens_all_stay():
    """Catches top-k that keeps one of several that share the k-th place, whichever the sort has put first."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(2000, -1)
    draws = choose_token(logits, Sampling(1.0, True, 2), torch.Generator().manual_seed(0))
    assert set(draws.flatten().tolist()) == {0, 1, 2, 3}


def test_top_p_ends_where_p_is_reached():
    """Catches a token too many where the likelier ones have p to the bit."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(2000, -1)
    for p, wanted in ((0.5, {0}), (0.501, {0, 1}), (0.75, {0, 1})):
        draws = choose_token(logits, Sampling(1.0, True, None, p), torch.Generator().manual_seed(0))
        assert len(set(draws.flatten().tolist())) == len(wanted), p


def test_narrow_logits_are_filtered_in_float32():
    """Catches probabilities summed up in bfloat16: 8 bits can't tell 510 of 1,024 equal ones from 511."""
    logits = torch.zeros(1, 1024, dtype=torch.bfloat16).expand(10_000, -1)
    draws = choose_token(logits, Sampling(1.0, True, None, 0.499), torch.Generator().manual_seed(0))
    assert len(set(draws.flatten().tolist())) == 511  # each of them is drawn some 20 times


def test_no_logit_is_too_large_for_a_temperature():
    """Catches infinity minus infinity: a large logit divided by a small temperature is beyond float32."""
    logits = torch.tensor([[1e10, 0.0, 2e10], [0.0, 1.0, 0.5]])  # each row by its own largest
    assert choose_token(logits, Sampling(1e-29, True)).tolist() == [[2], [1]]


@pytest.mark.parametrize("parameters", [{"top_k": V}, {"top_k": V + 1}, {"top_k": 10**6}, {"top_p": 1.0}], ids=str)
def test_limits_that_are_plain_sampling(parameters):
    """Catches top_k beyond the vocabulary that raises (row 35), and a filter that changes the draw without a reason."""
    model, idx = make_model(std=0.1), tokens(3, 4)
    plain = model.generate(idx, 25, do_sample=True, generator=torch.Generator().manual_seed(3))
    found = model.generate(idx, 25, do_sample=True, generator=torch.Generator().manual_seed(3), **parameters)
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({}, [0.07, 0.5, 0.03, 0.25, 0.15]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.8}, [0, 0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9]),  # 0.5 + 0.25 don't reach 0.8: the third stays
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3, 0]),  # 0.5 + 0.25 do
        ({"top_p": 0.49}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 3, 0, 1 / 3, 0]),  # among three, the two have 0.75 / 0.9 = 0.83
        # A temperature of 1/2 squares the probabilities: 49, 2500, 9, 625 and 225 parts of 3408.
        ({"temperature": 0.5}, [49 / 3408, 2500 / 3408, 9 / 3408, 625 / 3408, 225 / 3408]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 0.8, 0, 0.2, 0]),  # top_p after temperature: 2500 don't reach 0.8
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(parameters, wanted):
    """Catches a filter in the wrong order, off by one token, or not undone after sorting, by many draws."""
    n = 40_000
    logits = torch.tensor([0.07, 0.5, 0.03, 0.25, 0.15]).log() + 3.0  # a constant changes nothing
    settings = {"temperature": 1.0, "do_sample": True, "top_k": None, "top_p": None, **parameters}
    draws = choose_token(logits.expand(n, -1), Sampling(**settings), torch.Generator().manual_seed(0))
    assert draws.shape == (n, 1)
    assert draws.dtype == torch.int64
    for count, p in zip(torch.bincount(draws.flatten(), minlength=5).tolist(), wanted, strict=True):
        # Five standard deviations of a binomial count, with a fixed seed; a probability of 0 allows no draw at all.
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))


def test_rows_are_filtered_one_by_one():
    """Catches a threshold or an order that is taken from another row of the batch."""
    logits = torch.tensor([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]]).repeat(500, 1)
    for parameters in ({"top_k": 2, "top_p": None}, {"top_k": None, "top_p": 0.7}):
        draws = choose_token(logits, Sampling(1.0, True, **parameters), torch.Generator().manual_seed(0))
        assert set(draws[0::2].flatten().tolist()) <= {0, 1}
        assert set(draws[1::2].flatten().tolist()) == {2, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": -0.5},
        {"top_p": 1.01},
        {"top_p": math.nan},
    ],
    ids=str,
)
@pytest.mark.parametrize("new", [0, 3])
def test_bad_sampling_parameters_are_refused(wrong, new):
    """Catches nonsense that samples something anyway, or fails deep inside torch (row 35)."""
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: must [^\n]*$"):
        make_model().generate(tokens(1, 2), new, do_sample=True, **wrong)


def test_empty_prompt_is_refused():
    """Catches an index error where one line should say what is missing (row 35)."""
    with pytest.raises(ValueError, match="empty prompt"):
        make_model().generate(torch.zeros(1, 0, dtype=torch.int64), 3)


def test_same_seed_same_text():
    """Catches randomness that doesn't come from the generator that was given."""
    model, idx = make_model(std=0.1), tokens(2, 3)

    def sample(seed):
        return model.generate(idx, 30, do_sample=True, generator=torch.Generator().manual_seed(seed))

    first = sample(1)
    before = torch.get_rng_state()
    assert torch.equal(sample(1), first)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator isn't touched
    assert not torch.equal(sample(2), first)


def test_stream_yields_what_generate_returns():
    """Catches a stream that lags behind, or that leaves its caller without gradients."""
    model, idx = make_model(), tokens(2, 3)
    streamed = []
    for token in model.stream(idx, 20, Sampling()):
        assert token.shape == (2, 1)
        assert torch.is_grad_enabled()  # no_grad must not leak out of a suspended generator
        streamed.append(token)
    assert torch.equal(torch.cat((idx, *streamed), dim=1), model.generate(idx, 20))


def test_a_narrow_model_writes_text():
    """Catches a cache of another type than the model's: its keys would not fit the queries."""
    model = make_model().to(torch.bfloat16)
    assert model.generate(tokens(2, 3), 2 * T).shape == (2, 3 + 2 * T)


def test_writing_builds_no_graph():
    """Catches gradients that are kept for every token: memory that grows with the text."""
    model, needs_gradient = make_model(), []
    model.ln_f.register_forward_hook(lambda module, inputs, output: needs_gradient.append(output.requires_grad))
    model.generate(tokens(1, 3), 5)
    assert needs_gradient == [False] * 5


class PowerCutError(Exception):
    """What interrupts a generation in the test below."""


@pytest.mark.parametrize("training", [False, True])
def test_mode_is_restored(training):
    """Catches a model that goes on training in evaluation mode, after generating, an abandoned stream or an error."""
    model, idx = make_model(attn_pdrop=0.1).train(training), tokens(1, 3)

    def modes():
        return {module.training for module in model.modules()}

    model.generate(idx, 5)
    assert modes() == {training}

    stream = model.stream(idx, 5, Sampling())
    next(stream)
    next(stream)
    assert modes() == {False}
    stream.close()
    assert modes() == {training}

    for _ in model.stream(idx, 5, Sampling()):
        break  # the generator is dropped, and so closed
    assert modes() == {training}

    calls = []

    def fail_at_the_third_token(module: nn.Module, inputs: object, output: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise PowerCutError

    handle = model.ln_f.register_forward_hook(fail_at_the_third_token)
    with pytest.raises(PowerCutError):
        model.generate(idx, 5)
    handle.remove()
    assert modes() == {training}
