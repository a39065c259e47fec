//! SEQPACKET Unix sockets for tokio. Packets can carry credentials or a descriptor.
//!
//! Uses rustix for descriptors, because rustix returns owned descriptors. Uses nix for credentials,
//! because rustix cannot represent PID 0. The kernel attests PID 0 for a sender outside this PID
//! namespace.
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixCredentials};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::unix::AsyncFd;

use super::protocol::MAX_PACKET_BYTES;

/// Poll interval of [`Socket::wait_until_closed`].
const CLOSED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Retry interval of [`Socket::connect`] while the listener's queue is full.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum length of a socket's path, in bytes.
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The sender of a packet or the peer of a connection, attested by the kernel and translated into
/// this process's namespaces. PID 0 stands for a process outside these namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Credentials {
    /// Returns the credentials of this process.
    pub(crate) fn of_this_process() -> Self {
        Self {
            pid: std::process::id(),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        }
    }
}

/// A received packet.
#[derive(Debug, Default)]
pub(crate) struct Packet {
    pub(crate) data: Vec<u8>,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) descriptor: Option<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket(AsyncFd<OwnedFd>);

impl Socket {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        async_fd(fd).map(Self)
    }

    /// Prepares a relay between the socket `other`, which only this process uses, and a process
    /// that expects `other`.
    ///
    /// Returns `other`, this process's end of a new connection, and the other process's end. On
    /// this process's end, the kernel attests the sender of each packet. The other process's end
    /// has the type, flags and options of `other`.
    pub(crate) fn prepare_relay(other: OwnedFd) -> io::Result<(Self, Self, OwnedFd)> {
        let kind = rustix::net::sockopt::socket_type(&other)?;
        let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::fs::fcntl_setfl(&far, rustix::fs::fcntl_getfl(&other)?)?;
        rustix::net::sockopt::set_socket_passcred(&far, rustix::net::sockopt::socket_passcred(&other)?)?;
        // Without this call, credentials would use the buffer space for descriptors.
        rustix::net::sockopt::set_socket_passcred(&other, false)?;
        rustix::net::sockopt::set_socket_passcred(&near, true)?;
        for fd in [&other, &near] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok((Self::new(other)?, Self::new(near)?, far))
    }

    /// Connects. Waits while the listener's queue is full, without a deadline.
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        loop {
            let fd = new_socket()?;
            match rustix::net::connect(&fd, &address) {
                Ok(()) => return Self::new(fd),
                // The queue is full. Poll, because the kernel reports no event when the queue has
                // space again.
                Err(rustix::io::Errno::AGAIN) => tokio::time::sleep(CONNECT_RETRY_INTERVAL).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the credentials of the process that connected.
    pub(crate) fn peer(&self) -> io::Result<Credentials> {
        let peer = nix::sys::socket::getsockopt(&self.0, nix::sys::socket::sockopt::PeerCredentials)?;
        Ok(Credentials { pid: u32::try_from(peer.pid()).unwrap_or(0), uid: peer.uid(), gid: peer.gid() })
    }

    /// Sends one packet. Fails if the connection is closed, and never raises SIGPIPE.
    pub(crate) async fn send(&self, data: &[u8]) -> io::Result<()> {
        self.write(|fd| Ok(rustix::net::send(fd, data, SendFlags::NOSIGNAL).map(drop)?)).await
    }

    /// Sends one packet with credentials. `CAP_SYS_ADMIN` allows the credentials of any living
    /// process.
    pub(crate) async fn send_credentials(&self, data: &[u8], credentials: Credentials) -> io::Result<()> {
        self.write(|fd| send_without_waiting(fd, data, Some(credentials), MsgFlags::empty())).await
    }

    /// Sends one packet with a descriptor.
    pub(crate) async fn send_descriptor(&self, data: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.write(|fd| {
            let fds = [descriptor];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            Ok(rustix::net::sendmsg(fd, &[IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL).map(drop)?)
        })
        .await
    }

    /// Receives a packet of at most [`MAX_PACKET_BYTES`] bytes, without credentials or descriptor.
    /// Returns `None` once the peer has closed.
    pub(crate) async fn recv(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| {
            let mut data = vec![0; MAX_PACKET_BYTES];
            let (length, _) = rustix::net::recv(fd, data.as_mut_slice(), RecvFlags::empty())?;
            data.truncate(length);
            Ok(Packet { data, ..Packet::default() })
        })
        .await
    }

    /// Receives a packet as [`Socket::recv`] does, with the sender's credentials. Only for accepted
    /// sockets. The kernel drops descriptors in the packet.
    pub(crate) async fn recv_credentials(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_credentials(fd, MAX_PACKET_BYTES)).await
    }

    /// Receives a packet as [`Socket::recv`] does, with its first descriptor.
    pub(crate) async fn recv_descriptor(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_descriptor(fd, MAX_PACKET_BYTES)).await
    }

    /// Receives a packet of any length, with the first descriptor in it.
    pub(crate) async fn recv_any_length_with_descriptor(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_descriptor(fd, next_packet_bytes(fd)?)).await
    }

    /// Receives a packet of any length, with the sender's credentials. If the packet carries
    /// descriptors, the kernel drops them and marks the control data as truncated. The returned
    /// packet then has no credentials, because nix does not parse truncated control data.
    pub(crate) async fn recv_any_length_with_credentials(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_credentials(fd, next_packet_bytes(fd)?)).await
    }

    /// Returns within a second after the peer has closed, even if packets are still queued.
    ///
    /// Polls instead of using tokio's readiness: if this method cleared the readiness without
    /// reading, other waits on this socket would hang.
    pub(crate) async fn wait_until_closed(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        loop {
            let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
            if rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(closed) {
                return;
            }
            tokio::time::sleep(CLOSED_POLL_INTERVAL).await;
        }
    }

    /// Returns once the peer has closed or a packet is queued. Does not remove packets from the
    /// queue.
    pub(crate) async fn wait_until_closed_or_readable(&self) {
        loop {
            let Ok(mut ready) = self.0.readable().await else { return };
            let mut byte = [0_u8; 1];
            match rustix::net::recv(&self.0, byte.as_mut_slice(), RecvFlags::PEEK) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => ready.clear_ready(),
                _ => return,
            }
        }
    }

    async fn write(&self, mut attempt: impl FnMut(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        loop {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| retry_interrupted(|| attempt(fd.get_ref().as_fd()))) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    async fn read(&self, mut attempt: impl FnMut(BorrowedFd<'_>) -> io::Result<Packet>) -> io::Result<Option<Packet>> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| retry_interrupted(|| attempt(fd.get_ref().as_fd()))) {
                // An empty packet means the end of the connection: this protocol has no empty
                // packets.
                Ok(Ok(packet)) if packet.data.is_empty() => return Ok(None),
                Ok(Ok(packet)) => return Ok(Some(packet)),
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// A listening socket in the file system.
#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens at `path` for every user and replaces any existing file. The path appears only once
    /// the socket accepts connections and `label` has labelled it.
    ///
    /// # Errors
    /// Returns an error if a step fails. A file at `path` is then unchanged, unless the last step
    /// fails: the registration with tokio.
    pub(crate) fn bind(path: &Path, label: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<Self> {
        let building = path.with_extension("new");
        match std::fs::remove_file(&building) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = new_socket()?;
        // Accepted sockets inherit this option, so the kernel also attests the sender of their
        // first packet.
        rustix::net::sockopt::set_socket_passcred(&fd, true)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(&building)?)?;
        std::fs::set_permissions(&building, std::fs::Permissions::from_mode(0o666))?;
        rustix::net::listen(&fd, 4096)?;
        label(&building).and_then(|()| std::fs::rename(&building, path)).inspect_err(|_| {
            // The next call also removes the file.
            let _ = std::fs::remove_file(&building);
        })?;
        async_fd(fd).map(Self)
    }

    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        loop {
            let mut ready = self.0.readable().await?;
            let accept = || Ok(rustix::net::accept_with(&self.0, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?);
            match ready.try_io(|_| retry_interrupted(accept)) {
                Ok(fd) => {
                    let fd = fd?;
                    rustix::net::sockopt::set_socket_passcred(&fd, true)?;
                    return Socket::new(fd);
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// Registers a descriptor with tokio.
#[expect(
    deprecated,
    reason = "the replacement is unsafe and requires what the type guarantees here: an owned, never replaced descriptor"
)]
pub(crate) fn async_fd(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// Returns an unconnected, non-blocking socket.
fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Repeats a system call while signals interrupt it.
fn retry_interrupted<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Sends one packet without waiting, with the credentials if they are `Some`.
pub(crate) fn send_without_waiting(
    fd: impl AsFd,
    data: &[u8],
    credentials: Option<Credentials>,
    flags: MsgFlags,
) -> io::Result<()> {
    let ucred = match credentials {
        Some(Credentials { pid, uid, gid }) => {
            let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
            Some(UnixCredentials::from(nix::libc::ucred { pid, uid, gid }))
        }
        None => None,
    };
    let control: Vec<ControlMessage<'_>> = ucred.iter().map(ControlMessage::ScmCredentials).collect();
    let flags = flags | MsgFlags::MSG_NOSIGNAL;
    nix::sys::socket::sendmsg::<()>(fd.as_fd().as_raw_fd(), &[IoSlice::new(data)], &control, flags, None)?;
    Ok(())
}

/// Returns the buffer size in bytes for the next packet.
fn next_packet_bytes(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut byte = [0_u8; 1];
    let (_, length) = rustix::net::recv(fd, byte.as_mut_slice(), RecvFlags::PEEK | RecvFlags::TRUNC)?;
    // A stream socket has no packets and reports no length.
    Ok(length.max(MAX_PACKET_BYTES))
}

fn recv_credentials(fd: BorrowedFd<'_>, most: usize) -> io::Result<Packet> {
    let mut data = vec![0; most];
    let mut space = nix::cmsg_space!(nix::libc::ucred);
    let (length, credentials) = {
        let mut iov = [IoSliceMut::new(&mut data)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = nix::sys::socket::recvmsg::<()>(fd.as_raw_fd(), &mut iov, Some(&mut space), flags)?;
        let credentials = message.cmsgs().into_iter().flatten().find_map(|control| match control {
            ControlMessageOwned::ScmCredentials(ucred) => {
                Some(Credentials { pid: u32::try_from(ucred.pid()).unwrap_or(0), uid: ucred.uid(), gid: ucred.gid() })
            }
            _ => None,
        });
        (message.bytes, credentials)
    };
    data.truncate(length);
    Ok(Packet { data, credentials, descriptor: None })
}

fn recv_descriptor(fd: BorrowedFd<'_>, most: usize) -> io::Result<Packet> {
    let mut data = vec![0; most];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let length = {
        let mut iov = [IoSliceMut::new(&mut data)];
        rustix::net::recvmsg(fd, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    data.truncate(length);
    Ok(Packet { data, credentials: None, descriptor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_labelled_before_it_replaces_the_earlier_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let exists = || std::fs::symlink_metadata(&path).is_ok();
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(Listener::bind(&path, |_| Err(denied())).is_err());
        assert!(!exists(), "no socket without a label appears");
        let bound = Listener::bind(&path, |labelled| {
            assert!(!exists() && std::fs::symlink_metadata(labelled).is_ok());
            Ok(())
        });
        let earlier = bound.unwrap();
        assert!(Listener::bind(&path, |_| Err(denied())).is_err());
        let connected = Socket::connect(&path).await.unwrap();
        drop(earlier.accept().await.unwrap());
        drop(connected);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no other file remains");
    }
}
