//! Opens TCP ports that peers can reach over IPv4 and over IPv6.
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use rustix::io::Errno;
use rustix::net::sockopt::set_ipv6_v6only;
use tokio::net::{TcpListener, TcpSocket};

/// Maximum number of connections that wait in the kernel's queue until the program accepts them.
/// The kernel may apply a lower limit.
const LISTEN_BACKLOG: u32 = 1024;

/// Listens on an address. A listener on `[::]` also accepts IPv4, regardless of the node's setting
/// `net.ipv6.bindv6only`. If the address is `[::]` and the node has no IPv6, listens on `0.0.0.0`
/// instead.
///
/// # Errors
/// Returns an error if the address cannot be used, for example because its port is in use.
///
/// # Panics
/// Panics if called outside a Tokio runtime.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    listen_with(address, open_listener)
}

/// Opens a listener on an address, or on the address that [`ipv4_substitute`] returns if the first
/// attempt fails. `open` opens the listener.
fn listen_with<T>(address: SocketAddr, open: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    match open(address) {
        Err(error) => match ipv4_substitute(address, &error) {
            Some(substitute) => open(substitute),
            None => Err(error),
        },
        listener => listener,
    }
}

/// Returns the address to use instead of `address`: `0.0.0.0` for `[::]` if `error` means that the
/// node has no IPv6, and otherwise `None`.
fn ipv4_substitute(address: SocketAddr, error: &io::Error) -> Option<SocketAddr> {
    // In a kernel without IPv6, creating a socket fails. If a setting disables IPv6, binding may
    // fail.
    let disabled = matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL));
    let every_address = address.is_ipv6() && address.ip().is_unspecified();
    (disabled && every_address).then(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
}

fn open_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv6() {
        let socket = TcpSocket::new_v6()?;
        set_ipv6_v6only(&socket, false)?;
        socket
    } else {
        TcpSocket::new_v4()?
    };
    // With this option, a restarted program can use its port while old connections are in the state
    // TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket_address(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    /// Simulates a node on which opening an IPv6 listener fails with `errno`. Returns the address
    /// on which the program would listen.
    fn listen_without_ipv6(address: &str, errno: Errno) -> io::Result<SocketAddr> {
        listen_with(socket_address(address), |address| if address.is_ipv6() { Err(errno.into()) } else { Ok(address) })
    }

    #[test]
    fn without_ipv6_the_unspecified_address_is_replaced_by_that_of_ipv4() {
        for errno in [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL] {
            assert_eq!(listen_without_ipv6("[::]:8080", errno).unwrap(), socket_address("0.0.0.0:8080"));
            assert!(listen_without_ipv6("[::1]:8080", errno).is_err(), "a specific address is not replaced");
        }
        let busy = listen_without_ipv6("[::]:8080", Errno::ADDRINUSE).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::AddrInUse, "a port that is in use is reported");
        assert_eq!(listen_without_ipv6("10.0.0.1:80", Errno::AFNOSUPPORT).unwrap(), socket_address("10.0.0.1:80"));
    }
}
