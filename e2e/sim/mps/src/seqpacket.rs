//! Wraps Unix SEQPACKET sockets, which can transfer credentials and file descriptors.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixCredentials};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// The sender of a message, as the kernel attests it in the receiver's namespaces.
///
/// `pid` is 0 for a sender outside the receiver's PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The process's PID.
    pub pid: i32,
    /// The user's id.
    pub uid: u32,
    /// The group's id.
    pub gid: u32,
}

/// One end of a SEQPACKET connection.
#[derive(Debug)]
pub struct Connection(OwnedFd);

/// The result of one receive.
#[derive(Debug)]
pub struct Packet {
    /// The received bytes, at most the requested number.
    pub data: Vec<u8>,
    /// Whether the packet was longer than the requested number of bytes. The kernel then discards
    /// the remaining bytes.
    pub truncated: bool,
    /// The sender, if the packet carried credentials.
    pub credentials: Option<Credentials>,
    /// The first file descriptor in the packet, if any.
    pub fd: Option<OwnedFd>,
}

/// Poll flags, any of which means that the peer has closed the connection.
const CLOSED_POLL_FLAGS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

/// The kind of ancillary data that a call receives. The kernel drops all other ancillary data.
enum AncillaryData {
    Credentials,
    Descriptor,
}

impl Connection {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// Returns an error if no process listens at the socket.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = new_socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Creates a pair of connected sockets.
    ///
    /// # Errors
    /// Returns an error if the sockets cannot be created.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Wraps a file descriptor, which must be a SEQPACKET socket.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Makes the kernel attach the sender's credentials to every received message.
    ///
    /// # Errors
    /// Returns an error if the socket option cannot be set.
    pub fn enable_credentials(&self) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_socket_passcred(&self.0, true)?)
    }

    /// Sends one packet. If the peer has closed the connection, returns an error and does not raise
    /// SIGPIPE.
    pub fn send(&self, data: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.0, data, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends one packet. Fails with `WouldBlock` if the peer does not read.
    pub fn try_send(&self, data: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.0, data, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }

    /// Sends one packet with a file descriptor.
    ///
    /// # Errors
    /// Returns an error if the packet cannot be sent.
    pub fn send_fd(&self, data: &[u8], fd: BorrowedFd<'_>) -> io::Result<()> {
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        rustix::net::sendmsg(&self.0, &[IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends one packet with credentials. Credentials of another process require `CAP_SYS_ADMIN`.
    ///
    /// # Errors
    /// Returns an error if the packet cannot be sent, or if the kernel refuses the credentials.
    pub fn send_credentials(&self, data: &[u8], credentials: Credentials) -> io::Result<()> {
        let ucred = UnixCredentials::from(nix::libc::ucred {
            pid: credentials.pid,
            uid: credentials.uid,
            gid: credentials.gid,
        });
        nix::sys::socket::sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(data)],
            &[ControlMessage::ScmCredentials(&ucred)],
            MsgFlags::MSG_NOSIGNAL,
            None,
        )?;
        Ok(())
    }

    /// Waits for one packet, and returns at most `most` bytes of it. Returns `None` if the peer has
    /// closed the connection.
    ///
    /// # Errors
    /// Returns an error if the socket fails.
    pub fn recv(&self, most: usize) -> io::Result<Option<Packet>> {
        let mut data = vec![0; most];
        loop {
            match rustix::net::recv(&self.0, data.as_mut_slice(), RecvFlags::TRUNC) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return end_or_error(error.into()),
                Ok((_, 0)) => return Ok(None),
                Ok((read, length)) => {
                    data.truncate(read);
                    return Ok(Some(Packet { data, truncated: length > read, credentials: None, fd: None }));
                }
            }
        }
    }

    /// Like [`recv`](Self::recv), but fails with `TimedOut` at `deadline`.
    pub fn recv_until(&self, most: usize, deadline: Instant) -> io::Result<Option<Packet>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            let timeout = Timespec::try_from(left).ok();
            match rustix::event::poll(&mut fds, timeout.as_ref()) {
                Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return self.recv(most),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for one packet, with the sender's credentials if [`Self::enable_credentials`] was
    /// called. Drops descriptors in the packet.
    ///
    /// # Errors
    /// Returns an error if the socket fails.
    pub fn recv_credentials(&self, most: usize) -> io::Result<Option<Packet>> {
        self.recv_with(most, &AncillaryData::Credentials)
    }

    /// Waits for one packet that can carry a descriptor. Do not call this method after
    /// [`Self::enable_credentials`]: the buffer has no space for a descriptor and credentials.
    ///
    /// # Errors
    /// Returns an error if the socket fails.
    pub fn recv_fd(&self, most: usize) -> io::Result<Option<Packet>> {
        self.recv_with(most, &AncillaryData::Descriptor)
    }

    fn recv_with(&self, most: usize, wanted: &AncillaryData) -> io::Result<Option<Packet>> {
        let mut data = vec![0; most];
        let received = match wanted {
            AncillaryData::Credentials => self.recvmsg_credentials(&mut data),
            AncillaryData::Descriptor => self.recvmsg_fd(&mut data),
        };
        match received {
            Err(error) => end_or_error(error),
            Ok((0, ..)) => Ok(None),
            Ok((length, credentials, fd)) => {
                let truncated = length > most;
                data.truncate(length);
                Ok(Some(Packet { data, truncated, credentials, fd }))
            }
        }
    }

    /// Receives a packet with the sender's credentials. Uses nix, because the credentials of rustix
    /// cannot represent PID 0 (a sender outside the PID namespace).
    fn recvmsg_credentials(&self, data: &mut [u8]) -> io::Result<(usize, Option<Credentials>, Option<OwnedFd>)> {
        let mut space = nix::cmsg_space!(nix::libc::ucred);
        let mut iov = [IoSliceMut::new(data)];
        let message = loop {
            match nix::sys::socket::recvmsg::<()>(
                self.0.as_raw_fd(),
                &mut iov,
                Some(&mut space),
                MsgFlags::MSG_TRUNC | MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Err(nix::errno::Errno::EINTR) => {}
                other => break other?,
            }
        };
        let credentials = message.cmsgs().into_iter().flatten().find_map(|control| match control {
            ControlMessageOwned::ScmCredentials(ucred) => {
                Some(Credentials { pid: ucred.pid(), uid: ucred.uid(), gid: ucred.gid() })
            }
            _ => None,
        });
        Ok((message.bytes, credentials, None))
    }

    fn recvmsg_fd(&self, data: &mut [u8]) -> io::Result<(usize, Option<Credentials>, Option<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut iov = [IoSliceMut::new(data)];
            let flags = RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.0, &mut iov, &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        Ok((received.bytes, None, fd))
    }

    /// Waits for data on this connection. Returns false as soon as the peer has closed `other`.
    pub fn wait_readable_unless_closed(&self, other: &Self) -> bool {
        loop {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(&other.0, PollFlags::RDHUP)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) if fds[1].revents().intersects(CLOSED_POLL_FLAGS) => return false,
                Ok(_) if !fds[0].revents().is_empty() => return true,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Waits until the peer has closed the connection.
    pub fn wait_closed(&self) {
        let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
        while matches!(rustix::event::poll(&mut fds, None), Err(rustix::io::Errno::INTR)) {}
    }

    /// Returns whether [`recv`](Self::recv) would return immediately, because data is available or
    /// the peer has closed the connection.
    pub fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Returns whether the peer has closed the connection. Does not wait, and reads no data.
    pub fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
            && fds[0].revents().intersects(CLOSED_POLL_FLAGS)
    }

    /// Closes the connection for both ends, and wakes the threads that wait on it.
    pub fn shutdown(&self) {
        // Ignore errors, because the peer may have closed the connection already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> Self {
        connection.0
    }
}

/// A listening SEQPACKET socket at a path.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Replaces an existing socket file at `path`, and listens there. The new socket file has this
    /// mode.
    ///
    /// # Errors
    /// Returns an error if the existing file cannot be removed or the socket cannot be bound.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = new_socket()?;
        // Accepted connections inherit this option, so even their first message has credentials.
        rustix::net::sockopt::set_socket_passcred(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        rustix::net::listen(&socket, 1024)?;
        Ok(Self(socket))
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// Returns an error if the socket fails.
    pub fn accept(&self) -> io::Result<Connection> {
        loop {
            match rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                other => {
                    let connection = Connection(other?);
                    connection.enable_credentials()?;
                    return Ok(connection);
                }
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Returns `None` if the error means that the peer has exited. Returns any other error unchanged.
fn end_or_error(error: io::Error) -> io::Result<Option<Packet>> {
    if error.kind() == io::ErrorKind::ConnectionReset { Ok(None) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_carries_credentials_or_a_descriptor() {
        let (a, b) = Connection::pair().unwrap();
        b.enable_credentials().unwrap();
        let own = Credentials {
            pid: i32::try_from(std::process::id()).unwrap(),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        };
        a.send_credentials(b"who", own).unwrap();
        let packet = b.recv_credentials(16).unwrap().unwrap();
        assert_eq!((packet.data.as_slice(), packet.credentials), (b"who".as_slice(), Some(own)));
        b.send_fd(b"fd", b.as_fd()).unwrap();
        assert!(a.recv_fd(16).unwrap().unwrap().fd.is_some());
    }

    #[test]
    fn a_truncated_packet_is_marked_and_a_closed_peer_returns_none() {
        let (a, b) = Connection::pair().unwrap();
        b.enable_credentials().unwrap();
        a.send(&[1; 100]).unwrap();
        a.send(&[1; 100]).unwrap();
        assert!(b.recv(16).unwrap().unwrap().truncated);
        let packet = b.recv_credentials(16).unwrap().unwrap();
        assert!(packet.truncated);
        assert_eq!(packet.data.len(), 16);
        assert!(!b.is_closed());
        drop(a);
        assert!(b.is_closed());
        assert!(b.recv(16).unwrap().is_none());
    }

    #[test]
    fn the_kernel_drops_unexpected_descriptors() {
        let (a, b) = Connection::pair().unwrap();
        b.enable_credentials().unwrap();
        let (kept, sent) = Connection::pair().unwrap();
        a.send_fd(b"fd", sent.as_fd()).unwrap();
        drop(sent);
        // nix returns no ancillary data if the buffer was too small for all of the data.
        assert_eq!(b.recv_credentials(16).unwrap().unwrap().credentials, None);
        assert!(kept.is_closed());
    }
}
