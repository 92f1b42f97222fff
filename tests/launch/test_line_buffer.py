"""Lines of output: complete, prefixed, and the last ones."""

from __future__ import annotations

from tfdist._src.launch.job.log_routing import LineAssembler, last_lines


def test_complete_lines_get_a_prefix():
    for pieces, shown in [
        ([b"one\n"], b"[7] one\n"),
        ([b"o", b"n", b"e\ntw", b"o\n"], b"[7] one\n[7] two\n"),
        ([b"\n\n"], b"[7] \n[7] \n"),
        ([b"one\r\ntwo\r\n"], b"[7] one\n[7] two\n"),
        ([b"1/3\r2/3\r", b"3/3\n"], b"[7] 3/3\n"),
        ([b"no end"], b"[7] no end\n"),
        ([b""], b""),
        ([b"\xff\xfe\n"], b"[7] \xff\xfe\n"),
    ]:
        lines = LineAssembler("[7] ")
        assert b"".join(lines.feed(piece) for piece in pieces) + lines.flush() == shown
        assert lines.flush() == b""


def test_a_line_without_end_is_broken():
    lines = LineAssembler("")
    got = lines.feed(b"x" * 200_000)
    assert 0 < len(got) <= 200_000
    assert got.replace(b"\n", b"") + lines.flush().rstrip(b"\n") == b"x" * 200_000


def test_the_last_lines_are_kept(tmp_path):
    for content, last in [
        (b"", []),
        (b"\n \n", []),
        (b"one", ["one"]),
        (b"1\n2\n3\n4\n\n", ["2", "3", "4"]),
        (b"1\n\n3\n", ["1", "", "3"]),
        (b"0%\r50%\r100%\nend\n", ["100%", "end"]),
        (b"\xff\n", ["\ufffd"]),
        (b"x" * 1000, ["x" * 500]),
        (b"y\n" * 500_000, ["y", "y", "y"]),
    ]:
        (tmp_path / "log").write_bytes(content)
        assert last_lines(tmp_path / "log", 3) == last


def test_last_lines_of_no_file(tmp_path):
    assert last_lines(tmp_path / "log", 3) == []
