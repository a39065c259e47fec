//! Files that are whole or not there, whatever stops the writer; and those of others, followed as
//! they change.
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use tokio::time::sleep;

/// Looks now and whenever something in the folder changes, for ever; where that cannot be watched,
/// which `unwatched` is told, every so often.
pub(crate) async fn look_as_it_changes(
    folder: &Path,
    pause: Duration,
    mut look: impl FnMut(),
    unwatched: impl Fn(io::Error),
) {
    loop {
        match watch(folder) {
            Ok(mut events) => {
                look();
                // A folder that was removed tells nothing any more: the next one is watched anew.
                while let Some(Ok(event)) = events.next().await {
                    look();
                    if event.mask.contains(EventMask::IGNORED) {
                        break;
                    }
                }
            }
            Err(error) => unwatched(error),
        }
        look();
        sleep(pause).await;
    }
}

fn watch(folder: &Path) -> io::Result<EventStream<[u8; 1024]>> {
    let inotify = Inotify::init()?;
    inotify
        .watches()
        .add(folder, WatchMask::MOVED_TO | WatchMask::CLOSE_WRITE | WatchMask::DELETE | WatchMask::DELETE_SELF)?;
    inotify.into_event_stream([0; 1024])
}

/// Writes beside `path`, to the disk, and renames. The temporary name has a suffix of its own,
/// which no reader of the folder takes.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let beside = Path::new(&name);
    let written = File::create(beside).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(beside, path)).inspect_err(|_| {
        // Half a file must not stay; the first error is the one to tell.
        let _ = fs::remove_file(beside);
    })
}
