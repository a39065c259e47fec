//! SEQPACKET unix sockets under tokio, with the credentials and descriptors that packets carry.
//!
//! rustix does what passes descriptors, for they come back owned. nix does what carries credentials: rustix's cannot hold pid 0, which is
//! what the kernel attests for a sender outside this pid namespace.
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

use super::protocol::LONGEST;

/// How often [`Socket::closed`] looks.
const CLOSED: Duration = Duration::from_secs(1);

/// Who sent a packet, or connected, as the kernel attests it in this process's namespaces; pid 0 is somebody outside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Credentials {
    /// This process's.
    pub(crate) fn own() -> Self {
        Self {
            pid: std::process::id(),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        }
    }
}

/// A packet, cut at [`LONGEST`] bytes.
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
    fn of(fd: OwnedFd) -> io::Result<Self> {
        watched(fd).map(Self)
    }

    /// What it takes to stand between `other`, a socket that nobody else uses, and somebody who was to be given it: `other` itself, and the
    /// two ends of a new connection. The kernel attests to the first who speaks on the last, which else is like `other` was.
    pub(crate) fn in_place_of(other: OwnedFd) -> io::Result<(Self, Self, OwnedFd)> {
        let kind = rustix::net::sockopt::socket_type(&other)?;
        let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::fs::fcntl_setfl(&far, rustix::fs::fcntl_getfl(&other)?)?;
        rustix::net::sockopt::set_socket_passcred(&far, rustix::net::sockopt::socket_passcred(&other)?)?;
        // Credentials would take the room of descriptors.
        rustix::net::sockopt::set_socket_passcred(&other, false)?;
        rustix::net::sockopt::set_socket_passcred(&near, true)?;
        for fd in [&other, &near] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        Ok((Self::of(other)?, Self::of(near)?, far))
    }

    /// Connects, as soon as the other side's queue has room; without a deadline of its own.
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        loop {
            let fd = socket()?;
            match rustix::net::connect(&fd, &address) {
                Ok(()) => return Self::of(fd),
                // A full queue: the kernel offers nothing to wait on.
                Err(rustix::io::Errno::AGAIN) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Who connected.
    pub(crate) fn peer(&self) -> io::Result<Credentials> {
        let peer = nix::sys::socket::getsockopt(&self.0, nix::sys::socket::sockopt::PeerCredentials)?;
        Ok(Credentials { pid: u32::try_from(peer.pid()).unwrap_or(0), uid: peer.uid(), gid: peer.gid() })
    }

    /// Sends one packet. A peer that is gone is an error, never a signal.
    pub(crate) async fn send(&self, data: &[u8]) -> io::Result<()> {
        self.write(|fd| Ok(rustix::net::send(fd, data, SendFlags::NOSIGNAL).map(drop)?)).await
    }

    /// Sends one packet with credentials: with `CAP_SYS_ADMIN` anybody's that lives.
    pub(crate) async fn send_credentials(&self, data: &[u8], credentials: Credentials) -> io::Result<()> {
        self.write(|fd| send_credentials(fd, data, credentials)).await
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

    /// The next packet without what it carries; `None` when the peer has closed.
    pub(crate) async fn recv(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| {
            let mut data = vec![0; LONGEST];
            let (length, _) = rustix::net::recv(fd, data.as_mut_slice(), RecvFlags::empty())?;
            data.truncate(length);
            Ok(Packet { data, ..Packet::default() })
        })
        .await
    }

    /// The next packet with the sender's credentials, for a socket accepted here. Descriptors that come along are dropped by the kernel.
    pub(crate) async fn recv_credentials(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_credentials(fd, LONGEST)).await
    }

    /// The next packet with the first descriptor that it carries.
    pub(crate) async fn recv_descriptor(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_descriptor(fd, LONGEST)).await
    }

    /// The next packet, however long, with the first descriptor that it carries.
    pub(crate) async fn recv_whole_descriptor(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_descriptor(fd, length(fd)?)).await
    }

    /// The next packet, however long, with the sender's credentials; without, where it sent descriptors along, which the kernel drops.
    pub(crate) async fn recv_whole_credentials(&self) -> io::Result<Option<Packet>> {
        self.read(|fd| recv_credentials(fd, length(fd)?)).await
    }

    /// Returns when the peer has closed, whatever is still in the queue; within a second, and without what the other waits here live on: who
    /// takes a readiness away without reading would have them wait for ever.
    pub(crate) async fn closed(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        loop {
            let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
            if rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(closed) {
                return;
            }
            tokio::time::sleep(CLOSED).await;
        }
    }

    /// Returns when the peer has closed, or has said something although it is its turn to listen. Takes nothing out of the queue.
    pub(crate) async fn stirs(&self) {
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
            match ready.try_io(|fd| retry(|| attempt(fd.get_ref().as_fd()))) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    async fn read(&self, mut attempt: impl FnMut(BorrowedFd<'_>) -> io::Result<Packet>) -> io::Result<Option<Packet>> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| retry(|| attempt(fd.get_ref().as_fd()))) {
                // A packet of no bytes is what the end of the connection looks like; nothing here sends one.
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
    /// Listens at `path` for everybody, in place of what is there. The name appears only once it can be connected to.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let building = path.with_extension("new");
        match std::fs::remove_file(&building) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = socket()?;
        // Inherited by what is accepted: no packet can come before the kernel was asked to attest its sender.
        rustix::net::sockopt::set_socket_passcred(&fd, true)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(&building)?)?;
        std::fs::set_permissions(&building, std::fs::Permissions::from_mode(0o666))?;
        rustix::net::listen(&fd, 4096)?;
        std::fs::rename(&building, path)?;
        watched(fd).map(Self)
    }

    /// The next connection.
    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        loop {
            let mut ready = self.0.readable().await?;
            let accept = || Ok(rustix::net::accept_with(&self.0, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?);
            match ready.try_io(|_| retry(accept)) {
                Ok(fd) => {
                    let fd = fd?;
                    rustix::net::sockopt::set_socket_passcred(&fd, true)?;
                    return Socket::of(fd);
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// Has tokio wait on a descriptor.
#[expect(
    deprecated,
    reason = "what replaces it is unsafe, and asks for what holds here by type: owned, never replaced"
)]
pub(crate) fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// The longest path that a socket can have.
pub(crate) const LONGEST_PATH: usize = 107;

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn send_credentials(fd: BorrowedFd<'_>, data: &[u8], credentials: Credentials) -> io::Result<()> {
    let pid = i32::try_from(credentials.pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let ucred = UnixCredentials::from(nix::libc::ucred { pid, uid: credentials.uid, gid: credentials.gid });
    let message = [ControlMessage::ScmCredentials(&ucred)];
    nix::sys::socket::sendmsg::<()>(fd.as_raw_fd(), &[IoSlice::new(data)], &message, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Room for the next packet.
fn length(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut byte = [0_u8; 1];
    let (_, length) = rustix::net::recv(fd, byte.as_mut_slice(), RecvFlags::PEEK | RecvFlags::TRUNC)?;
    // A stream has no packets, and says nothing of its length.
    Ok(length.max(LONGEST))
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
