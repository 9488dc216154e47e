"""Run a program: call one kernel after the other, on all threads of a team, with barriers between.

A program is a table [n, 4] int64: address of the kernel, address of its arguments, how many there
are, and whether the next operation must wait until all threads have done this one. Words shared by
the team:

    ARRIVED   arrivals at barriers, ever growing     FROM, TO   operations of the present order
    DONE      operations done, ever growing          BASE       arrivals when it was given
    PROGRAM   address of the table                   HOME       not 0: there will be no more
    AT        a word a thread: its processor         MASKS      address of sets of processors

A thread that waits spins briefly, then yields: on a busy machine the processor goes to whoever has
work, perhaps to the thread that is waited for.

Linux may wake a thread on its waker's processor, and then leaves it there because its cache is
warm: the team would share one processor beside idle ones. So a worker that finds itself on the
processor of another of the team steps aside, and is then free to be moved again.
"""

from numba import types

from ds4d.cpu.jit import TABLE, WORD, Kernel, helper, kernel
from ds4d.cpu.kernels.simd import as_i8, as_u1, atomic_add, atomic_load, call_kernel

# Apart by cache lines: all threads wait on the first, one counts in the second.
ARRIVED, DONE, PROGRAM, FROM, TO, BASE, HOME, MASKS = 0, 16, 32, 33, 34, 35, 36, 37
AT = 48  # and on: where each thread runs
MASK_BYTES = 128  # a cpu_set_t
SPINS = 2000

sched_yield = types.ExternalFunction("sched_yield", types.int32())
sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
sched_setaffinity = types.ExternalFunction(
    "sched_setaffinity", types.int32(types.int32, types.int64, types.int64)
)
sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))


@helper
def _step_aside(team, tid, n_threads):
    """MASKS is the address of the set that the team may use, then of room for each thread's."""
    here = sched_getcpu()
    shared = False
    for other in range(tid):
        shared |= team[AT + other] == here
    if shared:
        whole, mask = as_u1(team[MASKS]), as_u1(team[MASKS] + tid * MASK_BYTES)
        for i in range(MASK_BYTES):
            mask[i] = whole[i]
        for other in range(n_threads):
            cpu = team[AT + other]
            if other != tid and 0 <= cpu < 8 * MASK_BYTES:
                mask[cpu >> 3] = mask[cpu >> 3] & ~(1 << (cpu & 7)) & 255
        left = 0
        for i in range(MASK_BYTES):
            left |= mask[i]
        if left != 0:
            sched_setaffinity(0, MASK_BYTES, team[MASKS] + tid * MASK_BYTES)
            sched_setaffinity(0, MASK_BYTES, team[MASKS])
            here = sched_getcpu()
    team[AT + tid] = here


@helper
def _replay(team, tid, n_threads):
    program, at_barrier = as_i8(team[PROGRAM]), team[BASE]
    for i in range(team[FROM], team[TO]):
        row = 4 * i
        call_kernel(program[row], program[row + 1], program[row + 2], tid, n_threads)
        if tid == 0:
            atomic_add(team, DONE, 1)
        if n_threads > 1 and program[row + 3] != 0:
            at_barrier += n_threads
            atomic_add(team, ARRIVED, 1)
            spins = 0
            while atomic_load(team, ARRIVED) < at_barrier:
                spins += 1
                if spins > SPINS:
                    sched_yield()


@kernel
def replay(team, tid, n_threads):
    """The caller's share of the present order; returns when all threads have done theirs."""
    _replay(team, tid, n_threads)


def _serve(team, tid, n_threads, semaphore):
    """A worker's life: sleep until there is an order, run it, sleep again."""
    while True:
        while sem_wait(semaphore) != 0:  # a signal woke it
            pass
        if atomic_load(team, HOME) != 0:
            return
        _step_aside(team, tid, n_threads)
        _replay(team, tid, n_threads)


serve = Kernel(_serve, types.void(TABLE, WORD, WORD, WORD))
