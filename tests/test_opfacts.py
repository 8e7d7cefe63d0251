"""What is known of ops beyond PyTorch's own marks."""

from types import SimpleNamespace

import pytest
import torch

from delta.runtime import cudnn
from delta.runtime.opfacts import facts_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "chooses"),
    [(aten.convolution.default, True), (aten.cudnn_convolution.default, True), (aten.mm.default, False)],
)
def test_whose_algorithm_cudnn_chooses(func, chooses):
    assert facts_of(func).cudnn_chooses is chooses


CONVOLVED = (None, None, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
TRANSPOSED = (*CONVOLVED[:6], True, *CONVOLVED[7:])


@pytest.mark.parametrize(
    ("func", "args", "kind", "fell_back", "searches", "replays"),
    [
        (aten.convolution.default, CONVOLVED, "cpu", True, True, True),
        (aten.convolution.default, CONVOLVED, "cuda", False, False, True),
        (aten.convolution.default, CONVOLVED, "cuda", True, False, False),
        (aten.convolution.default, CONVOLVED, "cuda", False, True, False),
        (aten.convolution.default, TRANSPOSED, "cpu", False, False, True),
        (aten.convolution.default, TRANSPOSED, "cuda", False, False, False),
        (aten.cudnn_convolution_transpose.default, (), "cuda", False, False, False),
        (aten.mm.default, (), "cuda", True, True, True),
        (aten.index_put.default, (None, [], None), "cpu", False, False, True),
        (aten.index_put.default, (None, [], None, False), "cpu", False, False, True),
        (aten.index_put.default, (None, [], None, True), "cpu", False, False, False),
        (aten.put_.default, (None, None, None, True), "cpu", False, False, False),
        (aten.index_put.default, (None, [], None), "cuda", False, False, False),
        (aten._unsafe_masked_index_put_accumulate.default, (), "cpu", False, False, False),
        (aten.scatter_add.default, (), "cpu", False, False, True),
        (aten.scatter_add.default, (), "cuda", False, False, False),
    ],
)
def test_what_gives_the_same_again(func, args, kind, fell_back, searches, replays, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_cudnn_benchmark", lambda: searches)
    monkeypatch.setattr(cudnn, "fell_back", lambda: fell_back)
    assert facts_of(func).replays_on(kind, args) is replays


@pytest.mark.parametrize(
    ("func", "replays"),
    [
        (aten._fused_moving_avg_obs_fq_helper.default, False),
        (aten._native_batch_norm_legit.default, True),
        (aten.add_.Tensor, True),
        (aten.add.out, True),
    ],
)
def test_what_writes_over_what_it_has_read_and_gives_something_new_is_not_run_again(func, replays):
    assert facts_of(func).replayable is replays


@pytest.mark.parametrize(
    ("func", "plain"),
    [
        (aten.mm.default, True),
        (aten.gelu.default, True),
        (aten.gelu_backward.default, True),
        (aten.gelu_.default, False),
        (aten.native_batch_norm.default, False),
        (aten.native_dropout.default, False),
        (aten.convolution.default, False),
        (aten.slow_conv_transpose2d.default, True),
        (aten.topk.default, False),
        (aten.cumsum.default, False),
        (aten.index_put.default, False),
        (aten.convolution_backward.default, False),
    ],
)
def test_what_its_arguments_alone_say_on_any_device(func, plain):
    assert facts_of(func).plain is plain


def test_what_threads_accumulate_is_replayed_where_sums_have_an_order(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", lambda: True)
    assert facts_of(aten.index_put.default).replays_on("cpu", (None, [], None, True))


@pytest.mark.parametrize("setting", ["_get_cudnn_deterministic", "_get_deterministic_algorithms"])
def test_a_transposed_convolution_is_replayed_where_sums_have_an_order(setting, monkeypatch):
    monkeypatch.setattr(torch._C, setting, lambda: True)
    assert facts_of(aten.convolution.default).replays_on("cuda", TRANSPOSED)


@pytest.mark.parametrize(("func", "heeded"), [(aten.convolution.default, True), (aten.mm.default, False)])
def test_whose_call_heeds_that_there_is_no_memory(func, heeded):
    device = SimpleNamespace(refusals=lambda: 3)
    assert facts_of(func).refusals(device) == (3 if heeded else 0)


# -- batch-norm statistics --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("func", "positions", "training"),
    [
        (aten.native_batch_norm.default, (3, 4), 5),
        (aten.cudnn_batch_norm.default, (3, 4), 5),
        (aten.miopen_batch_norm.default, (3, 4), 5),
        (aten._native_batch_norm_legit.default, (3, 4), 5),
        (aten._native_batch_norm_legit.no_stats, (), None),
        (aten._batch_norm_with_update.default, (3, 4), None),
        (aten.batch_norm_update_stats.default, (1, 2), None),
        (aten.batch_norm_gather_stats.default, (3, 4), None),
        (aten.batch_norm_gather_stats_with_counts.default, (3, 4), None),
        (aten.native_layer_norm.default, (), None),
        (aten.native_group_norm.default, (), None),
    ],
)
def test_which_ops_update_running_statistics(func, positions, training):
    facts = facts_of(func)
    assert (facts.statistics, facts.training) == (positions, training)
    names = [argument.name for argument in func._schema.arguments]
    assert [names[p] for p in positions] == ["running_mean", "running_var"][: len(positions)]
    assert facts.writes is (positions != ())


@pytest.mark.parametrize(("training", "written"), [(True, (3, 4)), (False, ())])
def test_statistics_are_written_in_training_only(training, written):
    stats = torch.zeros(2)
    args = (torch.zeros(3, 2), None, None, stats, stats.clone(), training, 0.1, 1e-5)
    assert facts_of(aten.native_batch_norm.default).statistics_written(args) == written


def test_statistics_that_are_not_kept_are_not_written():
    args = (torch.zeros(3, 2), None, None, None, torch.ones(2), True, 0.1, 1e-5)
    assert facts_of(aten.native_batch_norm.default).statistics_written(args) == (4,)


def test_ops_without_statistics_write_none():
    assert facts_of(aten.relu.default).statistics_written((torch.zeros(1),)) == ()
    no_stats = (torch.zeros(3, 2), None, None, True, 0.1, 1e-5)
    assert facts_of(aten._native_batch_norm_legit.no_stats).statistics_written(no_stats) == ()


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.native_batch_norm.default, lambda x, m, v: (x, None, None, m, v, True, 0.1, 1e-5)),
        (aten._native_batch_norm_legit.default, lambda x, m, v: (x, None, None, m, v, True, 0.1, 1e-5)),
        (aten._batch_norm_with_update.default, lambda x, m, v: (x, None, None, m, v, 0.1, 1e-5)),
        (aten.batch_norm_update_stats.default, lambda x, m, v: (x, m, v, 0.1)),
    ],
)
def test_torch_does_write_what_the_facts_say(func, args):
    """The reason for the list: torch marks none of these writes by a version."""
    mean, var = torch.zeros(2), torch.ones(2)
    given = args(torch.randn(8, 2) + 3, mean, var)
    written = [given[position] for position in facts_of(func).statistics_written(given)]
    assert [id(t) for t in written] == [id(mean), id(var)]
    func(*given)
    assert not torch.equal(mean, torch.zeros(2))
    assert not torch.equal(var, torch.ones(2))


# -- what is written --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("func", "mutates"),
    [
        (aten.add.Tensor, ()),
        (aten.add_.Tensor, (0,)),
        (aten.add.out, ("out",)),
        (aten.copy_.default, (0,)),
        (aten.aminmax.out, ("min", "max")),
        (aten._foreach_add_.List, (0,)),
        (aten.rrelu_with_noise.default, (1,)),
        (aten.rrelu_with_noise_.default, (0, 1)),
        (aten.squeeze_.default, (0,)),
    ],
)
def test_written_arguments(func, mutates):
    facts = facts_of(func)
    assert facts.mutates == mutates
    assert facts.writes is bool(mutates)


# -- what may run again -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "func",
    [
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.median.dim,
        aten.nonzero.default,
        aten._unique2.default,
        aten.multinomial.default,
        aten._local_scalar_dense.default,
        aten.rrelu_with_noise.default,
        aten.rrelu_with_noise_.default,
        aten._cudnn_rnn.default,
        aten._cudnn_init_dropout_state.default,
        aten.set_.source_Storage,
        aten.resize_.default,
        aten.masked_select.default,
        torch.ops.prims.convert_element_type.default,
    ],
)
def test_what_is_never_run_again(func):
    assert not facts_of(func).replayable
    assert not facts_of(func).replayable_on_cuda


@pytest.mark.parametrize(
    "func",
    [
        aten.addmm.default,
        aten.gelu.default,
        aten.native_layer_norm.default,
        aten.native_batch_norm.default,
        aten.native_dropout.default,
        aten.embedding.default,
        aten.add_.Tensor,
        aten.convolution.default,
        aten.gelu_backward.default,
        aten.threshold_backward.default,
    ],
)
def test_what_may_run_again_anywhere(func):
    assert facts_of(func).replayable
    assert facts_of(func).replayable_on_cuda


@pytest.mark.parametrize(
    "func",
    [
        aten.index_add_.default,
        aten.cumsum.default,
        aten.scatter_add.default,
        aten.scatter.src,
        aten.index_copy.default,
        aten.max_unpool2d.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ],
)
def test_threads_without_an_order_keep_an_op_from_running_again_on_cuda(func):
    assert facts_of(func).replayable
    assert not facts_of(func).replayable_on_cuda


@pytest.mark.parametrize(
    ("func", "seeded"),
    [
        (aten.native_dropout.default, True),
        (aten.bernoulli_.float, True),
        (aten.randn_like.default, True),
        (aten.uniform_.default, True),
        (aten.relu.default, False),
    ],
)
def test_which_ops_draw_random_numbers(func, seeded):
    assert facts_of(func).seeded is seeded


# -- views ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("func", "view"),
    [
        (aten.view.default, True),
        (aten.t.default, True),
        (aten.expand.default, True),
        (aten.split.Tensor, True),
        (aten.unbind.int, True),
        (aten.detach.default, True),
        (aten.slice.Tensor, True),
        (aten._unsafe_view.default, False),  # shares its input's storage, unmarked: identity decides after the call
        (aten.clone.default, False),
        (aten.add_.Tensor, False),
        (aten.squeeze_.default, False),
        (aten.relu.default, False),
        (aten._foreach_add_.List, False),
    ],
)
def test_views(func, view):
    assert facts_of(func).view is view


def test_names_are_those_rules_match():
    assert facts_of(aten._softmax.default).name == "aten._softmax"
    assert facts_of(aten.add.out).name == "aten.add"


def test_facts_are_found_once():
    assert facts_of(aten.relu.default) is facts_of(aten.relu.default)
