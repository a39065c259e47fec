//! Files that are whole or not there, whatever stops the writer.
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Writes beside `path`, to the disk, and renames. The temporary name has an ending of its own, which no reader of the folder takes.
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
