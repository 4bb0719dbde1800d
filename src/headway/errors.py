"""Every error that headway raises on purpose, and the exit code of a process that ends with it.

    HeadwayError                  1    a failure; the message says what happened, what was expected and what to do
    ├── UsageError                2    a bad setting, argument or environment; nothing was started or created
    │   ├── MissingExtra          2    an optional package is missing; the message has the pip command
    │   ├── UnevenBatch           2    a global batch cannot be split into equal parts, one for each rank
    │   └── UnreadableRun        86    a run with checkpoints cannot be read; headway never starts over silently
    ├── RankFailure               1    another rank failed, and this one stops because of it
    │   └── BarrierTimeout        1    some ranks did not reach a barrier; the message names them
    ├── BadShard                  1    a file is not a complete archive of samples
    ├── BadSample                 1    a sample cannot be decoded, or is larger than the limits allow
    ├── UnfitNodes                1    checks of the job's nodes failed, so the run would fail on them
    ├── SchedulerUnreachable      1    the scheduler could not be reached; nothing was submitted
    ├── IncompleteSubmission      1    submitting failed, but the job may be in the queue; its runs are kept
    ├── StorageError             74    the run's storage failed: disk full, read-only, input/output error
    │   └── RunLocked            74    another process is training in this run directory
    ├── Stopped                  75    stopped on request, with a checkpoint: the same command resumes
    ├── NoValidCheckpoint        86    checkpoints exist, but none is valid; headway never starts over silently
    │   └── NewerFormat          86    a checkpoint was written by a newer headway; it is left as it is
    └── NoProgress               93    three attempts without a new step: do not requeue

A plan that needs more memory than the device has exits with 3, Ctrl-C with 130, SIGTERM without a save with 143
(`DOES_NOT_FIT`, `INTERRUPTED`, `TERMINATED`).
"""

from __future__ import annotations

from collections.abc import Iterable

DONE = 0
DOES_NOT_FIT = 3
INTERRUPTED = 130
TERMINATED = 143

_MOST_NAMES = 40


class HeadwayError(Exception):
    """Base of all errors that headway raises on purpose: a message for people and an exit code for schedulers.

    try:
        pipe.run()
    except hw.errors.HeadwayError as error:
        sys.exit(error.exit_code)
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        # names of files, tensors and metrics are in messages, which reach terminals in many ways
        super().__init__(*(escape_controls(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(HeadwayError, ValueError):
    """Raised when a setting, an argument or the environment is wrong, before anything is started.

    raise hw.errors.UsageError("--batch 0: give a number of 1 or more")
    """

    exit_code = 2


class MissingExtra(UsageError):
    """Raised when a feature needs a package that is not installed.

    >>> raise MissingExtra("mpi4py", extra="mpi", purpose="to find the other ranks under this mpiexec")
    Traceback (most recent call last):
    headway.errors.MissingExtra: mpi4py is needed to find the other ranks under this mpiexec: pip install 'headway[mpi]'
    """

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{package} is needed {purpose}: pip install 'headway[{extra}]'")


class UnevenBatch(UsageError):
    """Raised when a global batch cannot be split into equal parts, one for each rank.

    A job on a range of nodes starts again on the largest number that can share it.

        hw.data.DataLoader(dataset, global_batch_size=96)  # on 64 ranks
    """

    def __init__(self, global_batch_size: int, world_size: int) -> None:
        super().__init__(
            f"global_batch_size={global_batch_size} cannot be split into {world_size} equal parts, one for each rank: "
            f"use a multiple of {world_size}, or another number of ranks"
        )
        self.global_batch_size, self.world_size = global_batch_size, world_size

    def __reduce__(self) -> tuple[type[UnevenBatch], tuple[int, int]]:
        return type(self), (self.global_batch_size, self.world_size)


class UnreadableRun(UsageError):
    """Raised when a run has checkpoints, but its run.json or config.yaml is damaged or from a newer headway.

    try:
        pipe.run()
    except hw.errors.UnreadableRun:
        ...                                                 # headway runs rebuild RUN restores run.json
    """

    exit_code = 86


class RankFailure(HeadwayError):
    """Raised on a healthy rank when another one failed; the message names that rank and the record of its failure.

    try:
        hw.barrier()
    except hw.errors.RankFailure as error:
        print(error)                                        # rank 2 failed (ValueError: ...); see failure.json
    """


class BarrierTimeout(RankFailure):
    """Raised when some ranks did not reach a barrier in time; the message names them.

    try:
        hw.barrier(timeout=60)
    except hw.errors.BarrierTimeout as error:
        print(error)                                        # names the ranks that are missing
    """


class UnfitNodes(HeadwayError):
    """Raised in a job, before its ranks start, when checks of its nodes fail.

    job = hw.launch(train, on=hw.Slurm(nodes=4, doctor=True))
    print(job.wait(), job.status().why)                     # failed; the reason names the checks
    """


class SchedulerUnreachable(HeadwayError):
    """Raised when a scheduler cannot be reached; the job is not in its queue.

    try:
        job = hw.launch(train, on=hw.Slurm(nodes=2))
    except hw.errors.SchedulerUnreachable:
        ...                                                 # nothing was submitted: try again later
    """


class IncompleteSubmission(HeadwayError):
    """Raised when a job may be in the queue although submitting it failed; its runs are kept.

    try:
        job = hw.launch(train, on=hw.Slurm(nodes=2))
    except hw.errors.IncompleteSubmission as error:
        print(error)                                        # how to find the job, and where its run is
    """


class BadShard(HeadwayError):
    """Raised when a file is not a complete tar archive of samples; the message has its path, position and remedy.

    try:
        hw.data.Shard.open(path)
    except hw.errors.BadShard as error:
        print(error)                                        # headway data check lists all of them
    """


class BadSample(HeadwayError):
    """Raised when a sample cannot be decoded, or is larger than the limits allow.

    def transform(sample, rng):
        if sample["jpg"].shape[0] < 32:
            raise hw.errors.BadSample("less than 32 pixels high")       # another sample takes its place
        return sample
    """


class StorageError(HeadwayError):
    """Raised when the run's storage fails: no space left, read-only, input/output error.

    try:
        hw.checkpoint.save("checkpoints", state, step=step)
    except hw.errors.StorageError as error:
        print(error)                                        # earlier checkpoints are unchanged
    """

    exit_code = 74


class RunLocked(StorageError):
    """Raised when another process holds the run directory.

    try:
        pipe.run()
    except hw.errors.RunLocked as error:
        print(error)                                        # names the process and its host
    """


class Stopped(HeadwayError):
    """Raised when a run stopped on request and left a checkpoint: the same command resumes from it.

    try:
        pipe.run()
    except hw.errors.Stopped:
        upload_logs()                                       # then exit with code 75
        raise
    """

    exit_code = 75


class NoValidCheckpoint(HeadwayError):
    """Raised when checkpoints exist but none is valid. Starting over would discard work, so headway refuses.

    try:
        loaded = hw.checkpoint.load_latest("checkpoints")
    except hw.errors.NoValidCheckpoint as error:
        print(error)                                        # the damaged ones are kept, as step-N.corrupt-1
    """

    exit_code = 86


class NewerFormat(NoValidCheckpoint):
    """Raised when a checkpoint was written by a newer version of headway, which does not mean that it is damaged.

    try:
        hw.checkpoint.load_latest(run)
    except hw.errors.NewerFormat as error:
        print(error)                                        # names the version to install
    """


class NoProgress(HeadwayError):
    """Raised when three attempts in a row made no new step: requeueing would only waste the allocation.

    try:
        pipe.run()
    except hw.errors.NoProgress as error:
        print(error)                                        # with the causes of the three attempts
    """

    exit_code = 93


def escape_controls(text: str) -> str:
    """Escapes control characters other than line ends and tabs, and those that change the direction of text.

    >>> escape_controls("runs/a\\x1b[2J\\u202e\\nnext")
    'runs/a\\\\x1b[2J\\\\u202e\\nnext'
    """
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    )


def unknown_name(kind: str, name: object, known: Iterable[object]) -> UsageError:
    """Returns the error for an unknown name; its message suggests the closest known one and lists all.

    >>> raise unknown_name("setting of Classify", "presicion", ["accumulate", "precision"])
    Traceback (most recent call last):
    headway.errors.UsageError: 'presicion' is not a valid setting of Classify (did you mean 'precision'?); \
valid: accumulate, precision
    """
    names = list(map(str, known))
    close = closest(str(name), names)
    hint = f" (did you mean {close!r}?)" if close else ""
    more = f", ... and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return UsageError(
        f"{name!r:.80} is not a valid {kind}{hint}; valid: {', '.join(names[:_MOST_NAMES])}{more}"
    )


def yaml_problem(error: Exception) -> str:
    """Describes an error in a YAML file and its line number, without the line itself, which may contain a secret.

    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    """
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}" if mark is not None else ""
    problem = " ".join(str(getattr(error, "problem", None) or type(error).__name__).split())
    return f"{problem:.120}{place}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelled or abbreviated one most likely stands for; case does not matter.

    >>> closest("shwo", ["show", "verify"]), closest("ver", ["show", "verify"]), closest("x", ["show"])
    ('show', 'verify', None)
    """
    from difflib import get_close_matches  # only for a message: difflib takes milliseconds to import

    candidates = {candidate.lower(): candidate for candidate in known}
    wanted = name.lower()
    found = get_close_matches(wanted, candidates, n=1, cutoff=0.8)
    # a name from another library may be longer, such as `lr_scheduler` for `lr`
    found = found or [candidate for candidate in candidates if wanted.startswith(f"{candidate}_")]
    found = found or get_close_matches(wanted, candidates, n=1)
    found = found or [candidate for candidate in candidates if wanted and candidate.startswith(wanted)]
    return candidates[found[0]] if found else None
