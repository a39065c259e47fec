//! Writes files atomically, and watches directories for changes.
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use serde::Serialize;
use tokio::time::sleep;

/// Calls `on_change` now, and after a file of the directory is written, moved or deleted. Never
/// returns. While inotify fails, calls `on_change` once per `interval`, and calls `on_error` only
/// with the first error.
pub(crate) async fn watch_directory(
    directory: &Path,
    interval: Duration,
    mut on_change: impl FnMut(),
    on_error: impl Fn(io::Error),
) {
    let mut failed = false;
    loop {
        match open_watch(directory) {
            Ok(mut events) => {
                failed = false;
                on_change();
                // After the directory is removed, its watch sends no more events. Watch the new
                // directory with the same path.
                while let Some(Ok(event)) = events.next().await {
                    on_change();
                    if event.mask.contains(EventMask::IGNORED) {
                        break;
                    }
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    on_error(error);
                }
            }
        }
        on_change();
        sleep(interval).await;
    }
}

fn open_watch(directory: &Path) -> io::Result<EventStream<[u8; 1024]>> {
    let inotify = Inotify::init()?;
    inotify.watches().add(
        directory,
        WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::CLOSE_WRITE
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF,
    )?;
    inotify.into_event_stream([0; 1024])
}

/// Writes a temporary file next to `path`, syncs the temporary file to disk, and renames it to
/// `path`. Programs that read the directory ignore the suffix of temporary files.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    write_atomically_with(path, |file| file.write_all(content))
}

/// Writes JSON like [`write_atomically`]. Does not keep the whole text in memory.
pub(crate) fn write_json_atomically(path: &Path, content: &impl Serialize) -> io::Result<()> {
    write_atomically_with(path, |file| {
        let mut buffered = BufWriter::new(file);
        serde_json::to_writer(&mut buffered, content)?;
        buffered.flush()
    })
}

/// Replaces a file like [`write_atomically`], but does not sync the file to disk. The content may
/// be lost if the node crashes.
pub(crate) fn replace_without_sync(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_file(path, |file| file.write_all(content))
}

fn write_atomically_with(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    replace_file(path, |file| {
        write(file)?;
        file.sync_all()
    })
}

fn replace_file(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let beside = Path::new(&name);
    let written = File::create(beside).and_then(|mut file| write(&mut file));
    written.and_then(|()| fs::rename(beside, path)).inspect_err(|_| {
        // Remove the partial file. Return the first error even if the removal fails.
        let _ = fs::remove_file(beside);
    })
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);
    /// A poll interval that is longer than any test, so that only inotify can report changes.
    const LONGER_THAN_ANY_TEST: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn moving_a_file_away_is_reported_as_a_change() {
        let (watched, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = watched.path().join("spec.json");
        fs::write(&file, "{}").unwrap();
        let (changes, mut changed) = watch::channel(());
        let watching = watch_directory(
            watched.path(),
            LONGER_THAN_ANY_TEST,
            || changes.send_replace(()),
            |error| panic!("{error}"),
        );
        let moving = async {
            // `watch_directory` calls `on_change` for the first time after the watch has started.
            timeout(TEST_TIMEOUT, changed.changed()).await.unwrap().unwrap();
            fs::rename(&file, elsewhere.path().join("spec.json")).unwrap();
            timeout(TEST_TIMEOUT, changed.changed()).await.expect("the move is reported").unwrap();
        };
        tokio::select! {
            () = watching => panic!("the watch has ended"),
            () = moving => {}
        }
    }
}
