"""What a step's graph may write before the step is sure to end well."""

import tensorflow as tf

from tfdist._src.strategy.commit_point import UPDATE, find_writes

SUM, WRITE, READ = "TfdistAllReduce", "AssignVariableOp", "ReadVariableOp"
RESOURCES = ("token", "v", "w")


def node(text):
    """An operation, as in `name: Type input ^control -> function other_function`."""
    left, _, functions = text.partition("->")
    name, _, rest = left.partition(":")
    op, *inputs = rest.split()
    made = tf.compat.v1.NodeDef(name=name, op=op, input=inputs)
    for number, function in enumerate(functions.split()):
        made.attr[f"function_{number}"].func.name = function
    return made


def graph(lines, **functions):
    """A graph with the inputs `token`, `v` and `w`, as have the functions that it calls."""
    made = tf.compat.v1.GraphDef()
    for name in RESOURCES:
        placeholder = made.node.add(name=name, op="Placeholder")
        placeholder.attr["dtype"].type = tf.resource.as_datatype_enum
    made.node.extend(node(line) for line in lines)
    for name, body in functions.items():
        function = made.library.function.add()
        function.signature.name = name
        for resource in RESOURCES:
            function.signature.input_arg.add(name=resource, type=tf.resource.as_datatype_enum)
        function.node_def.extend(node(line) for line in body)
    return made


CALL = "token v w ^sum"
UPDATING = [f"sum: {SUM} token x", f"gate: {UPDATE} v w ^sum", f"v_: {WRITE} v x ^gate"]
CASES = {
    "nothing": ([f"r: {READ} v"], "", False),
    "without an announcement": ([f"sum: {SUM} token x", f"v_: {WRITE} v x ^sum"], "v", False),
    "behind it": (UPDATING, "", True),
    "behind what is behind it": ([*UPDATING, f"w_: {WRITE} w x ^v_"], "", True),
    "by data": ([*UPDATING, f"r: {READ} v ^gate", f"w_: {WRITE} w r:value:0"], "", True),
    "beside it": ([*UPDATING, f"w_: {WRITE} w x"], "w", True),
    "behind it and beside it": ([*UPDATING, f"again: {WRITE} v x ^sum"], "v", False),
    "a sum after it": ([*UPDATING, f"more: {SUM} token x ^gate"], "v", False),
    "a sum that it does not wait for": ([*UPDATING, f"more: {SUM} token x"], "v", False),
    "a mark after it": ([*UPDATING, "more: TfdistReady token ^gate"], "", True),
    "in another order": (UPDATING[::-1], "", True),
    "two of them": ([*UPDATING, f"gate2: {UPDATE} w ^v_", f"w_: {WRITE} w x ^gate2"], "", True),
    "two of them, a sum between": (
        [
            *UPDATING,
            f"more: {SUM} token x ^v_",
            f"gate2: {UPDATE} w ^more",
            f"w_: {WRITE} w ^gate2",
        ],
        "v w",
        False,
    ),
    "by a collective itself": (["sum: TfdistCompressedAllReduce token x v"], "v", False),
    "by a selection": (["rows: TfdistSelect v"], "v", False),
    "of what passes it on": (["i: Identity v", f"v_: {WRITE} i:output:0 x"], "v", False),
    "in circles": ([f"a: {WRITE} v ^b", "b: NoOp ^a"], "token v w", False),
}


FIRST = f"sum: {SUM} token x"
IF = "if: If condition token v w ^sum -> update wait"
WAITING = [f"gate: {UPDATE} v w", f"w_: {WRITE} w x ^gate"]
CALLS = {
    "a function": ([FIRST, "f: PartitionedCall token v w ^sum -> update"], "", True),
    "a function before a sum": (
        ["f: PartitionedCall token v w -> update", f"{FIRST} ^f"],
        "v",
        False,
    ),
    "a function beside a sum": ([FIRST, "f: PartitionedCall token v w -> update"], "v", False),
    "both branches": ([FIRST, IF], "", True),
    "behind branches that both announce": ([FIRST, IF, f"w_: {WRITE} w x ^if"], "", True),
    "one branch": ([FIRST, "if: If c token v w ^sum -> update nothing"], "", True),
    "behind a branch that does not": (
        [FIRST, "if: If c token v w ^sum -> update nothing", f"w_: {WRITE} w x ^if"],
        "w",
        True,
    ),
    "one branch does not announce": (
        [FIRST, "if: If c token v w ^sum -> update write"],
        "v",
        False,
    ),
    "a function that announces too early": (
        [FIRST, "f: PartitionedCall token v w ^sum -> early"],
        "v",
        False,
    ),
    "a function that communicates after it": (
        [*UPDATING, "f: PartitionedCall token v w ^gate -> speak"],
        "v",
        False,
    ),
    "inside an update": ([*UPDATING, "if: If c token v w ^gate -> write nothing"], "", True),
    "a loop": ([FIRST, "l: While token v w ^sum -> nothing update"], "v", False),
    "a loop inside an update": ([*UPDATING, "l: While token v w ^gate -> nothing write"], "", True),
    "a function that nobody knows": (
        [*UPDATING, "f: PartitionedCall v -> other"],
        "token v w",
        False,
    ),
    "an operation that nobody knows": (
        [FIRST, "f: Strange token v ^sum -> update"],
        "v token",
        False,
    ),
}


def functions_for(case):
    write = f"v_: {WRITE} v x"
    return {
        "update": UPDATING,
        "wait": WAITING,
        "nothing": [],
        "speak": [UPDATING[0]],
        "early": [*UPDATING, f"more: {SUM} token x ^gate"],
        "write": [write] if "inside an update" in case else [UPDATING[0], f"{write} ^sum"],
    }


def test_writes_of_a_graph_are_kept_or_gated():
    for case, (lines, kept, gated) in {**CASES, **CALLS}.items():
        found = find_writes(graph(lines, **functions_for(case)))
        assert (found.kept, found.gated) == (set(kept.split()), gated), case
