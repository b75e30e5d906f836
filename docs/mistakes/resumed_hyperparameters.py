"""A resumed optimizer that silently keeps the old learning rate and weight decay (TUTORIAL.md, chapter 11)."""

from _shared import batch_of, is_quick, print_table, read_parts, small_model

from optimizer import OptimizerConfig, create_optimizer, load_optimizer_state, optimizer_state, set_learning_rate

OLD = OptimizerConfig(name="adamw", learning_rate=1e-3, weight_decay=0.1)
NEW = OptimizerConfig(name="adamw", learning_rate=2e-4, weight_decay=0.01)

if __name__ == "__main__":
    T = 32
    codes, _, vocab_size = read_parts(T, is_quick(__doc__))
    model = small_model(vocab_size, T)
    optimizer = create_optimizer(model, OLD)
    _, loss = model(*batch_of(codes, T, 8, seed=0))
    loss.backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    everything, averages = optimizer.state_dict(), optimizer_state(optimizer, parameters)

    rows: list[tuple[str, list[float]]] = [("what the configuration says now", [NEW.learning_rate, NEW.weight_decay])]
    for name, load in (
        ("wrong: load_state_dict", lambda resumed: resumed.load_state_dict(everything)),  # THE MISTAKE
        ("right: load_optimizer_state", lambda resumed: load_optimizer_state(resumed, parameters, averages)),
    ):
        resumed = create_optimizer(model, NEW)
        load(resumed)
        set_learning_rate(resumed, 1.0)  # the schedule at its peak
        rows.append((name, [resumed.param_groups[0]["lr"], resumed.param_groups[0]["weight_decay"]]))
    print_table(["learning rate used", "weight decay used"], rows)
