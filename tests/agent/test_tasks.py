import pytest
from kagent import tasks
from kagent.resources import resource
from kagent.tasks import command_word, find_task, seeds_of, sound_task, task_names
from kagent_sandbox.errors import MachineError, TaskError
from kagent_sandbox.judge.task_check import TaskCheck
from simulated_landscape import toy_task


def test_shipped_tasks_load_and_have_seeds():
    for name in task_names():
        task = find_task(name)
        assert task.name == name
        assert seeds_of(task)
        for seed in seeds_of(task, "triton"):
            assert seed.language == "triton"
            assert f"def {task.entry}" in seed.source()


def test_a_users_task_works_by_path(tmp_path):
    toy_task(tmp_path / "mine")
    (tmp_path / "mine" / "cpp_a.py").write_text("x = 1\n")
    (tmp_path / "mine" / "notes.py").write_text("")
    for path in (tmp_path / "mine", tmp_path / "mine" / "task.toml"):
        task = find_task(path)
        assert [s.name for s in seeds_of(task)] == ["cpp_a"]
        assert seeds_of(task, "cuda") == []


def test_commands_find_a_task_by_the_word_that_texts_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_word(find_task("softmax")) == "softmax"
    toy_task(tmp_path / "my tasks" / "softmax")
    own = find_task("my tasks/softmax")
    assert command_word(own) == "'./my tasks/softmax'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert command_word(own) == f"'{tmp_path.resolve()}/my tasks/softmax'"


@pytest.mark.parametrize(("count", "words"), [(1, "1 wrong result"), (2, "2 wrong results")])
def test_what_is_said_of_holes_can_be_pasted(tmp_path, monkeypatch, count, words):
    folder = tmp_path / "my folder"
    folder.mkdir()
    task = toy_task(folder)
    found = TaskCheck("cpu", "cpu", 1, (), 9, ("hole",) * count, 0.5, 0.1)
    monkeypatch.setattr(tasks, "check_task", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    said = []
    assert sound_task(task, "cpu", said.append) is found
    them = "it" if count == 1 else "them"
    assert said == [f"toy: {words} would pass: kagent check './my folder' names {them}"]


def test_an_unknown_task_is_answered_with_what_there_is():
    with pytest.raises(TaskError, match=r"did you mean softmax\?"):
        find_task("softmx")
    with pytest.raises(TaskError, match=r"there are .*softmax"):
        find_task("zzz")


def test_resources_are_found():
    assert resource("seeds").is_dir()
    with pytest.raises(MachineError, match="install it again"):
        resource("nonsense")
