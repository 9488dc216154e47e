"""Model files on this machine: fetched, checked, switched and found again (spec/serving.md 4.8).

    <models>/NAME/         one target: model file, drafter, prompt texts, and model.json about them
    <models>/NAME.part/    the same while it is being fetched
    <models>/current       a symlink to the NAME that is served
    <models>/previous      the one before it, for a rollback

    sources      where bytes come from: a file, or HTTP with all that may go wrong there
    fetch        a source to a file, over any number of cuts and restarts, hashed on the way
    manifest     which size and digest have been published for which release
    drafter      what a sidecar says about the target that it was made for
    encoder      the release's prompt texts out of its encoder file, parsed and never run
    directory    records, links, `resolve` and `check` for the daemon
    verify       what is right and wrong about one target, line by line
    installing   the steps of an installation
    verbs        the command line: `ds4d model install|verify|list|use|rollback|remove`

The operator runs the verbs; the daemon only resolves and checks. Nothing here knows a setting.
"""

from ds4d.model.install.directory import Record, Target, check, resolve

__all__ = ["Record", "Target", "check", "resolve"]
