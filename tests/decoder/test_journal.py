"""The file that keeps a generation's steps while its process may be killed."""

import errno

import portalocker
import pytest

from decoder.cli.journal import Journal, whole_lines

RECORDS = [{"tokens": [1, 2]}, {"text": "Ünïcode \n"}, {}]


def read(path) -> list[dict]:
    return [record for record, _ in whole_lines(path)]


def write(path, records, end: int = 0) -> None:
    journal = Journal(path)
    journal.end = end
    journal.open()
    for record in records:
        journal.append(record)
    journal.close()


def test_after_a_cut_at_any_byte_whole_lines_are_read_and_writing_goes_on_behind_them(tmp_path):
    write(tmp_path / "whole", RECORDS)
    data = (tmp_path / "whole").read_bytes()
    ends = [end for _, end in whole_lines(tmp_path / "whole")]
    for cut in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(path) == RECORDS[:whole]
        write(path, RECORDS[whole:], end=[0, *ends][whole])
        assert path.read_bytes() == data


@pytest.mark.parametrize("line", [b"[1]\n", b"no JSON\n", b"\xff\xfe\n", b"\n"])
def test_a_line_that_is_no_object_is_dropped_as_the_last_and_refused_in_front_of_others(tmp_path, line):
    log = tmp_path / "log"
    write(log, RECORDS)
    first = next(whole_lines(log))[1]
    data = log.read_bytes()
    log.write_bytes(data + line)
    assert read(log) == RECORDS
    log.write_bytes(data[:first] + line + data[first:])
    lines = whole_lines(log)
    assert next(lines) == (RECORDS[0], first)
    with pytest.raises(ValueError, match=f"^line 2 of {log} is damaged: move that file away, or choose another --outp"):
        next(lines)
    assert read(tmp_path / "missing") == []


def test_a_line_that_a_full_disk_cut_is_written_over(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "folder/log")
    journal.open()
    journal.append(RECORDS[0])

    def full(file, line):
        file.write(line[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("decoder.cli.journal.write_whole", full)
        with pytest.raises(OSError, match="No space left") as raised:
            journal.append(RECORDS[1])
    assert raised.value.filename == str(journal.path)
    journal.append(RECORDS[1])
    journal.close()
    assert read(journal.path) == RECORDS[:2]
    with pytest.raises(ValueError, match="not open"):
        journal.append(RECORDS[2])


def test_one_writer_holds_the_file_and_a_new_one_must_be_new(tmp_path):
    one, other = Journal(tmp_path / "log"), Journal(tmp_path / "log")
    one.open("busy", new=True)
    with pytest.raises(OSError, match="busy"):
        other.open("busy")
    assert not other.is_open
    one.close()
    with pytest.raises(FileExistsError):
        other.open("busy", new=True)
    other.open("busy")
    other.close()


@pytest.mark.parametrize(("seconds", "syncs"), [(0.0, [1, 2, 3, 4]), (3600.0, [4])])
def test_lines_reach_the_disk_at_once_or_after_some_time_and_at_the_end(tmp_path, monkeypatch, seconds, syncs):
    seen = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append(len(read(journal.path))))
    journal = Journal(tmp_path / "log", seconds)
    journal.open()
    for _ in range(4):
        journal.append({})
    journal.close()
    journal.close()
    assert seen == syncs


def test_a_disk_that_fails_at_the_end_is_named_and_the_file_closed(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path / "log", 3600.0)
    journal.open()
    journal.append({})
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        journal.close()
    assert raised.value.filename == str(journal.path) and not journal.is_open


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def no_locks(*_):
        raise portalocker.LockException(OSError(errno.ENOLCK, "No locks available"))

    monkeypatch.setattr(portalocker, "lock", no_locks)
    journal = Journal(tmp_path / "log")
    journal.open("busy")
    journal.append(RECORDS[0])
    journal.close()
    assert read(journal.path) == RECORDS[:1]
