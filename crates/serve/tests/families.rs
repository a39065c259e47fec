//! Tests that peers can reach a port on `[::]` over IPv4 and over IPv6.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use cleave_serve::{http, tcp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// Time limit of a request. Long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends an HTTP request. Returns the first line of the answer.
async fn request(address: IpAddr, port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((address, port)).await?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn a_port_on_the_unspecified_address_can_be_reached_over_ipv4_and_ipv6() {
    let listener = tcp::listen((Ipv6Addr::UNSPECIFIED, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let router = Router::new().route("/healthz", get(|| async { "ok" }));
    let server = tokio::spawn(http::serve(listener, router, http::Limits::default(), stop.clone()));
    let mut peers = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    // On a machine without IPv6, the listener is on the IPv4 address instead. If a setting disables
    // IPv6, the listener may be on `[::]`, but no interface has an IPv6 address.
    let has_ipv6 = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if has_ipv6 {
        assert!(address.is_ipv6(), "{address}");
        peers.push(Ipv6Addr::LOCALHOST.into());
    }
    for peer in peers {
        let answer = tokio::time::timeout(TEST_TIMEOUT, request(peer, address.port())).await.unwrap();
        assert_eq!(answer.unwrap(), "HTTP/1.1 200 OK", "over {peer}");
    }
    stop.cancel();
    server.await.unwrap();
}

#[tokio::test]
async fn an_ipv4_address_is_not_replaced_and_a_port_in_use_is_an_error() {
    let listener = tcp::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    assert_eq!(address.ip(), Ipv4Addr::LOCALHOST);
    assert_eq!(tcp::listen(address).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
}
