"""Tags become one path component and come back; paths stay inside."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_ckpt_store.contract import names
from ds_ckpt_store.errors import ManifestError, TagError

SAVE = names.new_save_id(1_700_000_000_000, random.Random(1))


@given(st.text(max_size=300))
@example("a/b")
@example("ü 1%+")
@example(" leading")
@example("step 10 ")
@example(".hidden")
@example("a@b@" + SAVE)
@example("%2F")
@example("\\back\\slash")
@example("🙂" * 10)
def test_a_tag_is_refused_or_becomes_one_component_that_gives_the_tag_back(tag: str) -> None:
    try:
        folder = names.folder_of(tag, SAVE)
    except TagError:
        return
    assert names.tag_of(folder) == (tag, SAVE)
    assert "/" not in folder
    assert not folder.startswith((".", " "))
    assert len(folder.encode()) <= 255


@given(st.text(max_size=40), st.text(max_size=40))
@example("a/b", "a%2Fb")
@example("A", "a")
def test_two_tags_never_share_a_folder(one: str, other: str) -> None:
    folders = []
    for tag in (one, other):
        try:
            folders.append(names.folder_of(tag, SAVE))
        except TagError:
            return
    assert (folders[0] == folders[1]) == (one == other)


@pytest.mark.parametrize("tag", ["a/b", "ü 1%+", "global_step10", "10", ".x", " y", "a b+c?&#"])
def test_tags_that_people_use_are_taken(tag: str) -> None:
    assert names.check_tag(tag) == tag


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("", "empty"),
        ("..", "not normalized"),
        ("a/../b", "not normalized"),
        ("./a", "not normalized"),
        ("a//b", "not normalized"),
        ("a/", "not normalized"),
        ("/abs", "absolute"),
        ("x" * 300, "over 255 bytes"),
        ("/".join(["x" * 90] * 3), "200 is the most"),
        ("%" * 100, "200 is the most"),
        ("a\nb", "control"),
        ("a\x00b", "control"),
        ("\x85", "control"),
        ("\ud800", "not UTF-8"),
        (".ds_ckpt", "reserved"),
        (".ds_ckpt/outbox", "reserved"),
        (".companions/x", "reserved"),
        ("latest", "latest"),
        ("latest/1", "latest"),
    ],
)
def test_a_tag_that_cannot_work_is_refused_with_the_reason(tag: str, why: str) -> None:
    with pytest.raises(TagError, match=why):
        names.check_tag(tag)


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "latest",
        "global_step1",
        f"@{SAVE[:-1]}",
        f"a@{SAVE}x",
        f"a/b@{SAVE}",
        f"a%@{SAVE}",
        f"a%zz@{SAVE}",
        f"a%FF@{SAVE}",
        f"a%+1@{SAVE}",
    ],
)
def test_text_that_is_no_folder_of_ours_is_recognised(folder: str) -> None:
    with pytest.raises(TagError):
        names.tag_of(folder)


@given(st.text(max_size=80))
@example(f"%2e%2e@{SAVE}")
@example(f"\ud800@{SAVE}")
def test_what_reads_as_a_folder_is_exactly_what_would_be_written(folder: str) -> None:
    try:
        tag, save_id = names.tag_of(folder)
    except TagError:
        return
    try:
        assert names.folder_of(tag, save_id) == folder
    except TagError:
        return


@given(st.text(max_size=1200))
@example("a/" * 600 + "a")
@example("x" * 256)
@example("é" * 128)
def test_a_path_that_passes_cannot_leave_its_root(path: str) -> None:
    try:
        names.check_relative_path(path)
    except ManifestError:
        return
    components = path.split("/")
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(components)
    assert components[0] not in (".ds_ckpt", ".companions")
    assert all(len(component.encode()) <= 255 for component in components)
    assert "\x00" not in path


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a\x00", ".ds_ckpt/x", ""])
def test_a_path_that_leads_away_is_refused(path: str) -> None:
    with pytest.raises(ManifestError):
        names.check_relative_path(path)


@given(st.integers(0, 2**48 - 2), st.integers(0, 2**32))
def test_save_ids_sort_by_time(time_ms: int, seed: int) -> None:
    rng = random.Random(seed)
    earlier, later = names.new_save_id(time_ms, rng), names.new_save_id(time_ms + 1, rng)
    assert names.is_save_id(earlier)
    assert earlier < later


@pytest.mark.parametrize("text", ["", SAVE.upper(), SAVE + "\n", SAVE[1:], f"{SAVE}.json"])
def test_only_the_exact_form_is_a_save_id(text: str) -> None:
    assert not names.is_save_id(text) or text == SAVE
