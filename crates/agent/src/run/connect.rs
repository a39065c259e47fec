//! The way to the API server from inside a pod: a service account's token, and the cluster's CA,
//! both read again as they are renewed.
//!
//! `kube::Client::try_default` is the same for a pod, and knows kubeconfig files too: YAML,
//! `JSONPath`, regular expressions and programs that give tokens, 1.5 MiB of code that would stay
//! resident on each node.
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderValue, Request, Uri, header};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::Body;
use kube::client::middleware::BaseUriLayer;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tower::{BoxError, ServiceBuilder};

/// Where Kubernetes puts the token and the CA into each container.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// How long a token is used that was read: the kubelet renews it when a fifth of its life is left.
const TOKEN: Duration = Duration::from_secs(60);
/// As `kube` has them: watches end after 290 s of themselves, so what is silent for longer is dead.
const CONNECT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(295);

/// Why there is no way to the API server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoWay {
    #[error("{0} is not set: this is no pod")]
    NoPod(&'static str),
    #[error("{0:?} is no address of an API server")]
    Address(String, #[source] http::Error),
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("TLS cannot be had")]
    Tls(#[from] rustls::Error),
}

/// A client for the API server of the cluster that this pod runs in.
pub(crate) fn in_cluster() -> Result<Client, NoWay> {
    let variable = |name| std::env::var(name).map_err(|_| NoWay::NoPod(name));
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    client(&authority(&host, &port), Path::new(SERVICE_ACCOUNT))
}

/// IPv6 addresses stand in brackets.
fn authority(host: &str, port: &str) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn client(authority: &str, account: &Path) -> Result<Client, NoWay> {
    let uri = Uri::builder().scheme("https").authority(authority).path_and_query("/").build();
    let uri = uri.map_err(|error| NoWay::Address(authority.to_owned(), error))?;
    let token = Token::read(account.join("token"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let ca = CurrentCa { file: account.join("ca.crt"), provider: Arc::clone(&provider) };
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ca))
        .with_no_client_auth();
    // A session that goes on would go on whatever the CA file says by now.
    tls.resumption = rustls::client::Resumption::disabled();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let https =
        hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1().wrap_connector(tcp);
    let mut connector = hyper_timeout::TimeoutConnector::new(https);
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_read_timeout(Some(SILENCE));
    connector.set_write_timeout(Some(SILENCE));
    let http = legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let service = ServiceBuilder::new()
        .layer(BaseUriLayer::new(uri))
        .map_request(move |mut request: Request<Body>| {
            request.headers_mut().extend(token.now().map(|token| (header::AUTHORIZATION, token)));
            request
        })
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, "default"))
}

/// The service account's token.
#[derive(Clone)]
struct Token {
    file: Arc<Path>,
    read: Arc<Mutex<(Option<HeaderValue>, Instant)>>,
}

impl Token {
    fn read(file: PathBuf) -> Result<Self, NoWay> {
        let text = std::fs::read_to_string(&file);
        let text = text.map_err(|source| NoWay::Read { path: file.clone(), source })?;
        Ok(Self { file: file.into(), read: Arc::new(Mutex::new((bearer(&text), Instant::now()))) })
    }

    /// The token as the file has it, or had it within the last minute. A file that cannot be read
    /// leaves the last one in force.
    fn now(&self) -> Option<HeaderValue> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.1.elapsed() >= TOKEN {
            let token = std::fs::read_to_string(&self.file).ok().and_then(|text| bearer(&text));
            *read = (token.or_else(|| read.0.take()), Instant::now());
        }
        read.0.clone()
    }
}

fn bearer(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Believes what the CA file says at the time of each handshake: clusters renew their CA.
struct CurrentCa {
    file: PathBuf,
    provider: Arc<CryptoProvider>,
}

impl CurrentCa {
    fn verifier(&self) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
        let wrong = |error: &dyn fmt::Display| rustls::Error::General(format!("{}: {error}", self.file.display()));
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.file).map_err(|error| wrong(&error))? {
            roots.add(certificate.map_err(|error| wrong(&error))?)?;
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
            .build()
            .map_err(|error| wrong(&error))
    }
}

impl fmt::Debug for CurrentCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CurrentCa").field(&self.file).finish()
    }
}

impl ServerCertVerifier for CurrentCa {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verifier()?.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    fn authority_of_its_own() -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn acceptor(ca: &CertifiedIssuer<'static, KeyPair>) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().signed_by(&key, ca).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    /// Answers one connection's one request, and gives the request's head; an error if TLS did not
    /// come about.
    async fn answer(listener: &TcpListener, acceptor: &TlsAcceptor) -> std::io::Result<String> {
        let (stream, _) = listener.accept().await?;
        let mut stream = acceptor.accept(stream).await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let body = r#"{"major":"1","minor":"36","gitVersion":"v1.36.4","gitCommit":"","gitTreeState":"","buildDate":"","goVersion":"","compiler":"","platform":""}"#;
        let reply = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(reply.as_bytes()).await?;
        stream.shutdown().await?;
        Ok(String::from_utf8_lossy(&head).into_owned())
    }

    #[tokio::test]
    async fn the_api_server_is_known_by_the_ca_of_now_and_told_the_token() {
        let account = tempfile::tempdir().unwrap();
        let (first, second) = (authority_of_its_own(), authority_of_its_own());
        let ca = account.path().join("ca.crt");
        std::fs::write(&ca, first.pem()).unwrap();
        std::fs::write(account.path().join("token"), "one\n").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let client = client(&authority("127.0.0.1", &at.port().to_string()), account.path()).unwrap();

        let of_first = acceptor(&first);
        let (version, head) = tokio::join!(client.apiserver_version(), answer(&listener, &of_first));
        assert_eq!(version.unwrap().minor, "36");
        let head = head.unwrap().to_lowercase();
        assert!(head.starts_with("get /version ") && head.contains("authorization: bearer one\r\n"), "{head}");

        let of_second = acceptor(&second);
        let (version, head) = tokio::join!(client.apiserver_version(), answer(&listener, &of_second));
        assert!(version.is_err() && head.is_err(), "a server of another CA was believed");

        std::fs::write(&ca, format!("{}{}", first.pem(), second.pem())).unwrap();
        let (version, head) = tokio::join!(client.apiserver_version(), answer(&listener, &of_second));
        assert!(version.is_ok() && head.is_ok(), "{version:?}");

        std::fs::write(&ca, "no certificate").unwrap();
        let (version, _) = tokio::join!(client.apiserver_version(), answer(&listener, &of_second));
        assert!(version.is_err(), "without a CA nobody is believed");
    }

    #[test]
    fn a_token_is_read_again_and_the_last_one_stays_where_that_fails() {
        let account = tempfile::tempdir().unwrap();
        let file = account.path().join("token");
        assert!(matches!(Token::read(file.clone()), Err(NoWay::Read { .. })));
        std::fs::write(&file, "one").unwrap();
        let token = Token::read(file.clone()).unwrap();
        let old = || token.read.lock().unwrap().1 = Instant::now().checked_sub(TOKEN).unwrap();
        std::fs::write(&file, "two").unwrap();
        assert_eq!(token.now().unwrap(), "Bearer one", "it is not a minute old");
        old();
        assert_eq!(token.now().unwrap(), "Bearer two");
        std::fs::remove_file(&file).unwrap();
        old();
        assert_eq!(token.now().unwrap(), "Bearer two");
        assert!(token.now().unwrap().is_sensitive());
    }

    #[test]
    fn addresses_are_authorities_and_nonsense_is_told() {
        assert_eq!(authority("10.0.0.1", "443"), "10.0.0.1:443");
        assert_eq!(authority("fd00::1", "443"), "[fd00::1]:443");
        assert!(matches!(client("a b:c", Path::new("/nowhere")), Err(NoWay::Address(..))));
    }
}
