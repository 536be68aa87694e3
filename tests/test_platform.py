import pytest

from perilune import platform
from perilune.errors import ConfigError

GIB = 1 << 30


def make_machine(tmp_path, *, cgroup_lines, files):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (proc / "self/cgroup").write_text(cgroup_lines)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_without_a_limit_the_machine_s_free_memory_counts(tmp_path):
    proc, cgroup = make_machine(
        tmp_path, cgroup_lines="0::/a\n", files={"a/memory.max": "max\n", "a/memory.current": "5\n"}
    )
    assert platform.free_memory(proc, cgroup) == platform.FreeMemory(8 * GIB, "the free memory of this machine")


def test_a_limit_cuts_it_and_page_cache_is_not_counted_as_used(tmp_path):
    files = {
        "a/b/memory.max": f"{4 * GIB}\n",
        "a/b/memory.current": f"{3 * GIB}\n",
        "a/b/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n",
    }
    proc, cgroup = make_machine(tmp_path, cgroup_lines="0::/a/b\n", files=files)
    assert platform.available_memory_bytes(proc, cgroup) == 3 * GIB


def test_a_parent_s_tighter_limit_wins(tmp_path):
    files = {
        "a/b/memory.max": f"{4 * GIB}\n",
        "a/b/memory.current": "0\n",
        "a/memory.max": f"{2 * GIB}\n",
        "a/memory.current": f"{GIB}\n",
    }
    proc, cgroup = make_machine(tmp_path, cgroup_lines="0::/a/b\n", files=files)
    assert platform.available_memory_bytes(proc, cgroup) == GIB
    assert platform.free_memory(proc, cgroup).bound == f"the memory cgroup ({cgroup / 'a/memory.max'})"


def test_the_older_layout_is_read_and_host_paths_that_are_absent_do_no_harm(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }
    proc, cgroup = make_machine(tmp_path, cgroup_lines="4:memory:/docker/xyz\n1:cpu:/\n", files=files)
    assert platform.available_memory_bytes(proc, cgroup) == 2 * GIB
    assert platform.free_memory(proc, cgroup).bound.endswith("memory/memory.limit_in_bytes)")


def test_a_usage_above_the_limit_leaves_nothing(tmp_path):
    files = {"memory.max": "10\n", "memory.current": "20\n"}
    proc, cgroup = make_machine(tmp_path, cgroup_lines="0::/\n", files=files)
    assert platform.available_memory_bytes(proc, cgroup) == 0


def test_a_machine_that_does_not_say_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="give the size of the cache yourself"):
        platform.available_memory_bytes(tmp_path, tmp_path)


def test_this_machine_has_processors_and_memory():
    assert platform.num_cpus() >= 1
    assert platform.available_memory_bytes() > 0


@pytest.mark.parametrize(("flags", "pays"), [("fma avx512_bf16", False), ("fma amx_bf16 amx_tile", True), ("", False)])
def test_bfloat16_pays_with_tile_instructions_only(tmp_path, flags, pays):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert platform.bfloat16_pays(tmp_path) is pays


def test_the_largest_cache_is_found(tmp_path):
    for index, size in enumerate(("32K", "512K", "36M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert platform.largest_cache_bytes(tmp_path) == 36 << 20
    assert platform.largest_cache_bytes(tmp_path / "none") == 32 << 20
