//! The webhook's TLS certificate. The operator creates the certificate, stores it in a Secret, and
//! renews it before it expires.
//!
//! Each certificate has its own CA. The operator discards the CA's key after signing, so the CA
//! cannot sign another certificate. The Secret contains the certificate, its key, and the CAs that
//! API servers must trust: the certificate's own CA and, if it is still valid, the previous
//! certificate's CA. API servers therefore also trust a replica that still serves the previous
//! certificate. [`next_step`] selects the next action and is pure. The function detects an expired
//! certificate by verifying the certificate as a client does.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::leader::LeaseGuard;

/// How long a certificate is valid after its creation.
pub(crate) const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(90 * 24 * 3600);
/// How long before its expiry a certificate is renewed.
pub(crate) const RENEW_BEFORE_EXPIRY: Duration = Duration::from_secs(30 * 24 * 3600);
/// Maximum time that an API server's clock may be behind the operator's clock.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3600);
/// Delay between the publication of a new CA and the first use of a certificate that the CA signed.
/// During the delay, API servers receive the CA through their watch of the webhook configuration.
const CA_PUBLICATION_DELAY: Duration = Duration::from_secs(2);
/// Intervals between reads of the Secret: normally, and while no certificate is served.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(1));
/// Time limit of a request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// Keys of the entries in the Secret's data, as in Secrets of type `kubernetes.io/tls`.
const CERTIFICATE_ENTRY: &str = "tls.crt";
const KEY_ENTRY: &str = "tls.key";
const AUTHORITIES_ENTRY: &str = "ca.crt";

/// A certificate could not be created or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The certificate library failed to create a key or a certificate.
    #[error("failed to create a certificate")]
    Create(#[source] rcgen::Error),
    /// The Secret has no entry with this key, or the entry contains no certificate.
    #[error("the Secret has no {0}")]
    Lacks(&'static str),
    /// An entry of the Secret is not PEM.
    #[error("{0} of the Secret is not valid PEM")]
    Pem(&'static str, #[source] rustls::pki_types::pem::Error),
    /// The certificate and the key do not match, or a CA or the key is not supported.
    #[error("the Secret's certificate, key and CAs do not match")]
    Unusable(#[source] rustls::Error),
    /// The CAs cannot be used to verify a certificate.
    #[error("the Secret's CAs cannot verify a certificate")]
    Authorities(#[source] rustls::client::VerifierBuilderError),
}

/// A certificate with its key and the CAs to trust.
#[derive(Debug, Clone)]
pub(crate) struct Certificate {
    chain_pem: String,
    key_pem: String,
    /// The CAs to trust, in DER. The certificate's own CA is the first.
    authorities: Vec<CertificateDer<'static>>,
    authorities_pem: String,
    served: Arc<CertifiedKey>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl Certificate {
    /// Creates a certificate for a host, with a new CA. The CA of `previous` remains trusted,
    /// because a replica may still serve `previous`.
    pub(crate) fn create(host: &str, now: SystemTime, previous: Option<&Self>) -> Result<Self, Error> {
        let key = KeyPair::generate().map_err(Error::Create)?;
        let mut leaf = certificate_params(vec![host.to_owned()], host.to_owned(), now)?;
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        leaf.use_authority_key_identifier_extension = true;
        // Each CA needs a unique name, because clients find a certificate's issuer by name.
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut ca = certificate_params(Vec::new(), format!("{host} since {since}"), now)?;
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer =
            CertifiedIssuer::self_signed(ca, KeyPair::generate().map_err(Error::Create)?).map_err(Error::Create)?;
        let certificate = leaf.signed_by(&key, &issuer).map_err(Error::Create)?.pem();
        let mut authorities = issuer.pem();
        if let Some(own) = previous.and_then(Self::own_authority) {
            authorities.push_str(&own);
        }
        Self::new(certificate, key.serialize_pem(), authorities)
    }

    /// Parses the data of a Secret. Returns `None` if the data is empty.
    pub(crate) fn from_secret_data(data: &BTreeMap<String, ByteString>) -> Result<Option<Self>, Error> {
        if data.values().all(|value| value.0.is_empty()) {
            return Ok(None);
        }
        let part = |name: &'static str| {
            let bytes = data.get(name).ok_or(Error::Lacks(name))?;
            Ok(String::from_utf8_lossy(&bytes.0).into_owned())
        };
        Self::new(part(CERTIFICATE_ENTRY)?, part(KEY_ENTRY)?, part(AUTHORITIES_ENTRY)?).map(Some)
    }

    /// Returns the data of the Secret that stores this certificate.
    pub(crate) fn secret_data(&self) -> BTreeMap<String, ByteString> {
        let parts = [
            (CERTIFICATE_ENTRY, &self.chain_pem),
            (KEY_ENTRY, &self.key_pem),
            (AUTHORITIES_ENTRY, &self.authorities_pem),
        ];
        parts.into_iter().map(|(name, text)| (name.to_owned(), ByteString(text.clone().into_bytes()))).collect()
    }

    fn new(chain_pem: String, key_pem: String, authorities_pem: String) -> Result<Self, Error> {
        let chain = parse_certificates(&chain_pem, CERTIFICATE_ENTRY)?;
        let authorities = parse_certificates(&authorities_pem, AUTHORITIES_ENTRY)?;
        let private =
            PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|error| Error::Pem(KEY_ENTRY, error))?;
        let provider = crypto_provider();
        let served = CertifiedKey::from_der(chain, private, &provider).map_err(Error::Unusable)?;
        let mut roots = RootCertStore::empty();
        for authority in &authorities {
            roots.add(authority.clone()).map_err(Error::Unusable)?;
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(Error::Authorities)?;
        Ok(Self { chain_pem, key_pem, authorities, authorities_pem, served: Arc::new(served), verifier })
    }

    /// Returns the certificate and key in the form that the TLS server requires.
    pub(crate) fn certified_key(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.served)
    }

    /// Returns whether a client that trusts the CAs accepts the certificate for this host at this
    /// time.
    pub(crate) fn is_trusted(&self, host: &str, at: SystemTime) -> bool {
        let (Ok(name), Ok(since)) = (ServerName::try_from(host), at.duration_since(SystemTime::UNIX_EPOCH)) else {
            return false;
        };
        let at = UnixTime::since_unix_epoch(since);
        self.served
            .end_entity_cert()
            .is_ok_and(|certificate| self.verifier.verify_server_cert(certificate, &[], &name, &[], at).is_ok())
    }

    /// Returns whether a client that trusts `bundle` trusts all CAs of this certificate.
    pub(crate) fn is_trusted_by(&self, bundle: Option<&ByteString>) -> bool {
        let trusted: Vec<_> = bundle
            .into_iter()
            .flat_map(|bundle| CertificateDer::pem_slice_iter(&bundle.0).filter_map(Result::ok))
            .collect();
        self.authorities.iter().all(|authority| trusted.contains(authority))
    }

    /// Returns the certificate's own CA, the first in the list, as PEM. Returns `None` if the list
    /// contains no complete PEM block.
    fn own_authority(&self) -> Option<String> {
        const PEM_END: &str = "-----END CERTIFICATE-----\n";
        let pem = self.authorities_pem.replace("\r\n", "\n");
        pem.find(PEM_END).map(|end| pem[..end + PEM_END.len()].to_owned())
    }
}

fn certificate_params(names: Vec<String>, common_name: String, now: SystemTime) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(names).map_err(Error::Create)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = (now - MAX_CLOCK_SKEW).into();
    params.not_after = (now + CERTIFICATE_VALIDITY).into();
    Ok(params)
}

fn parse_certificates(pem: &str, part: &'static str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    found
        .map_err(|error| Error::Pem(part, error))
        .and_then(|found| if found.is_empty() { Err(Error::Lacks(part)) } else { Ok(found) })
}

fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The next action of the certificate manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CertificateStep {
    /// Serve the stored certificate.
    Serve,
    /// Create a new certificate, and serve it once API servers trust it.
    Renew,
    /// No stored certificate is trusted: create a new certificate, even if this process does not
    /// lead.
    Create,
}

/// Returns the next action, given the stored certificate.
///
/// Only the leader renews a certificate. Otherwise replicas could undo each other's changes before
/// API servers receive them. If no valid certificate is stored, any replica creates one, because
/// the leader may be an older replica without a webhook during a rollout. The API server accepts
/// only the first write.
pub(crate) fn next_step(stored: Option<&Certificate>, host: &str, now: SystemTime, leads: bool) -> CertificateStep {
    match stored {
        Some(stored) if stored.is_trusted(host, now) => {
            if leads && !stored.is_trusted(host, now + RENEW_BEFORE_EXPIRY) {
                CertificateStep::Renew
            } else {
                CertificateStep::Serve
            }
        }
        _ => CertificateStep::Create,
    }
}

/// Receives the certificate to serve. `None` until the first certificate exists.
pub(crate) type CertificateReceiver = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// Serves the current certificate on each new connection.
#[derive(Debug)]
struct CurrentCertificate(CertificateReceiver);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().clone()
    }
}

/// Returns the TLS configuration of the webhook.
///
/// # Errors
/// Returns an error if the TLS library does not support the configuration.
pub(crate) fn tls_config(served: CertificateReceiver) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(CurrentCertificate(served)));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The certificate could not be updated.
#[derive(Debug, thiserror::Error)]
enum UpdateError {
    #[error("the API server refused the request or is unreachable")]
    Api(#[from] kube::Error),
    #[error("the API server did not answer within {} s", REQUEST_TIMEOUT.as_secs())]
    Timeout,
    #[error("the Secret {0} does not exist. It is part of the Helm release: run `helm upgrade` to recreate it")]
    NoSecret(String),
    #[error(transparent)]
    Certificate(#[from] Error),
}

/// Keeps the certificate in the Secret, the CAs in the webhook configuration, and the served
/// certificate up to date.
pub(crate) struct CertificateManager {
    secrets: Api<Secret>,
    webhooks: Api<MutatingWebhookConfiguration>,
    /// Name of the Secret, the Service and the webhook configuration.
    name: String,
    /// Host name that API servers use for the Service.
    host: String,
    claim: LeaseGuard,
    /// The last certificate that the manager could read.
    known: Option<Certificate>,
    served: watch::Sender<Option<Arc<CertifiedKey>>>,
}

impl CertificateManager {
    /// Creates a manager, and the receiver of the served certificate.
    pub(crate) fn new(
        client: &kube::Client,
        namespace: &str,
        name: String,
        claim: LeaseGuard,
    ) -> (Self, CertificateReceiver) {
        let (served, receiver) = watch::channel(None);
        let host = format!("{name}.{namespace}.svc");
        let secrets = Api::namespaced(client.clone(), namespace);
        (Self { secrets, webhooks: Api::all(client.clone()), name, host, claim, known: None, served }, receiver)
    }

    /// Updates the certificate until `stop` is cancelled.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut leadership = self.claim.clone();
        loop {
            if let Err(error) = self.update(SystemTime::now(), self.claim.is_current()).await {
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to update the webhook's certificate");
            }
            let delay = if self.served.borrow().is_some() { POLL_INTERVALS.0 } else { POLL_INTERVALS.1 };
            // All branches are cancel-safe: they wait for a token, a watch channel and a timer.
            tokio::select! {
                () = stop.cancelled() => return,
                () = leadership.changed() => {}
                () = tokio::time::sleep(delay) => {}
            }
        }
    }

    /// Reads the Secret once and executes the next step. `leads` states whether this process holds
    /// the lease.
    async fn update(&mut self, now: SystemTime, leads: bool) -> Result<(), UpdateError> {
        let secret = with_timeout(self.secrets.get_opt(&self.name)).await?;
        let secret = secret.ok_or_else(|| UpdateError::NoSecret(self.name.clone()))?;
        let stored =
            Certificate::from_secret_data(secret.data.as_ref().unwrap_or(&BTreeMap::new())).unwrap_or_else(|error| {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "ignored an invalid certificate in the Secret"
                );
                None
            });
        let current = match next_step(stored.as_ref(), &self.host, now, leads) {
            CertificateStep::Serve => stored,
            step => Some(self.replace_certificate(secret, stored, step, now).await?),
        };
        if let Some(current) = current {
            self.publish_authorities(&current).await?;
            self.served.send_if_modified(|served| {
                let differs = served.as_ref().is_none_or(|served| served.cert != current.served.cert);
                *served = Some(current.certified_key());
                differs
            });
            self.known = Some(current);
        }
        Ok(())
    }

    /// Creates a new certificate and stores it.
    async fn replace_certificate(
        &self,
        mut secret: Secret,
        stored: Option<Certificate>,
        step: CertificateStep,
        now: SystemTime,
    ) -> Result<Certificate, UpdateError> {
        // Other replicas may still serve the stored certificate, or the last readable certificate.
        // API servers must continue to trust that certificate's CA.
        let before = stored.or_else(|| self.known.clone()).filter(|before| before.is_trusted(&self.host, now));
        let current = Certificate::create(&self.host, now, before.as_ref())?;
        tracing::info!(secret = self.name, ?step, "creating a new webhook certificate");
        if step == CertificateStep::Renew || before.is_some() {
            self.publish_authorities(&current).await?;
            tokio::time::sleep(CA_PUBLICATION_DELAY).await;
        }
        secret.data = Some(current.secret_data());
        // The request includes the `resourceVersion` that was read, so only one replica's write
        // succeeds. The other replicas then read that replica's certificate.
        with_timeout(self.secrets.replace(&self.name, &PostParams::default(), &secret)).await?;
        Ok(current)
    }

    /// Writes the certificate's CAs to each webhook of the configuration that lacks one of them, so
    /// that API servers trust the CAs.
    async fn publish_authorities(&self, current: &Certificate) -> Result<(), UpdateError> {
        let configured = with_timeout(self.webhooks.get(&self.name)).await?;
        for webhook in configured.webhooks.unwrap_or_default() {
            if current.is_trusted_by(webhook.client_config.ca_bundle.as_ref()) {
                continue;
            }
            let bundle = ByteString(current.authorities_pem.clone().into_bytes());
            let change = json!({"webhooks": [{"name": webhook.name, "clientConfig": {"caBundle": bundle}}]});
            with_timeout(self.webhooks.patch(&self.name, &PatchParams::default(), &Patch::Strategic(change))).await?;
            tracing::info!(configuration = self.name, "wrote the CA bundle to the webhook configuration");
        }
        Ok(())
    }
}

async fn with_timeout<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, UpdateError> {
    Ok(tokio::time::timeout(REQUEST_TIMEOUT, request).await.map_err(|_| UpdateError::Timeout)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE_HOST: &str = "cleave-webhook.cleave-system.svc";

    /// Returns a fixed time in whole seconds, which is the precision of certificates.
    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn new_certificate() -> Certificate {
        Certificate::create(SERVICE_HOST, now(), None).unwrap()
    }

    #[test]
    fn a_certificate_is_valid_for_its_host_and_lifetime() {
        let made = new_certificate();
        let minute = Duration::from_secs(60);
        for at in [now(), now() - MAX_CLOCK_SKEW + minute, now() + CERTIFICATE_VALIDITY - minute] {
            assert!(made.is_trusted(SERVICE_HOST, at));
            assert!(!made.is_trusted("cleave-webhook.other.svc", at));
        }
        for at in
            [now() - MAX_CLOCK_SKEW - minute, now() + CERTIFICATE_VALIDITY + minute, SystemTime::UNIX_EPOCH - minute]
        {
            assert!(!made.is_trusted(SERVICE_HOST, at));
        }
    }

    #[test]
    fn a_stored_certificate_is_read_back() {
        let (made, other) = (new_certificate(), new_certificate());
        let read = Certificate::from_secret_data(&made.secret_data()).unwrap().unwrap();
        assert_eq!(read.secret_data(), made.secret_data());
        assert!(read.is_trusted(SERVICE_HOST, now()));
        assert!(Certificate::from_secret_data(&BTreeMap::new()).unwrap().is_none());
        let emptied = made.secret_data().into_keys().map(|key| (key, ByteString(Vec::new()))).collect();
        assert!(Certificate::from_secret_data(&emptied).unwrap().is_none());
        for part in [CERTIFICATE_ENTRY, KEY_ENTRY, AUTHORITIES_ENTRY] {
            for spoiled in
                [&b""[..], b"\xff", b"none", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
            {
                let mut data = made.secret_data();
                data.insert(part.to_owned(), ByteString(spoiled.to_vec()));
                assert!(Certificate::from_secret_data(&data).is_err(), "{part}: {spoiled:?}");
            }
            let mut data = made.secret_data();
            data.remove(part);
            assert!(Certificate::from_secret_data(&data).is_err(), "no {part}");
        }
        // The key or the CA belongs to another certificate.
        let mut data = made.secret_data();
        data.insert(KEY_ENTRY.to_owned(), other.secret_data()[KEY_ENTRY].clone());
        assert!(Certificate::from_secret_data(&data).is_err());
        let mut data = made.secret_data();
        data.insert(AUTHORITIES_ENTRY.to_owned(), other.secret_data()[AUTHORITIES_ENTRY].clone());
        assert!(!Certificate::from_secret_data(&data).unwrap().unwrap().is_trusted(SERVICE_HOST, now()));
    }

    #[test]
    fn the_previous_certificate_is_trusted_while_it_may_be_served() {
        let first = new_certificate();
        let second = Certificate::create(SERVICE_HOST, now() + RENEW_BEFORE_EXPIRY, Some(&first)).unwrap();
        let third = Certificate::create(SERVICE_HOST, now() + CERTIFICATE_VALIDITY, Some(&second)).unwrap();
        let bundle = |current: &Certificate| current.secret_data()[AUTHORITIES_ENTRY].clone();
        // The server presents the first certificate to a client that trusts the second
        // certificate's CAs.
        let mut served = second.secret_data();
        served.insert(CERTIFICATE_ENTRY.to_owned(), first.secret_data()[CERTIFICATE_ENTRY].clone());
        served.insert(KEY_ENTRY.to_owned(), first.secret_data()[KEY_ENTRY].clone());
        assert!(
            Certificate::from_secret_data(&served)
                .unwrap()
                .unwrap()
                .is_trusted(SERVICE_HOST, now() + RENEW_BEFORE_EXPIRY)
        );
        assert!(first.is_trusted_by(Some(&bundle(&second))));
        assert!(!second.is_trusted_by(Some(&bundle(&first))), "the second CA is not published yet");
        assert!(!first.is_trusted_by(Some(&bundle(&third))), "old CAs are dropped");
        assert_eq!(third.authorities.len(), 2);
        for spoiled in [None, Some(ByteString(Vec::new())), Some(ByteString(b"none".to_vec()))] {
            assert!(!first.is_trusted_by(spoiled.as_ref()));
        }
    }

    #[test]
    fn the_leader_renews_a_certificate_and_any_replica_creates_one() {
        let made = new_certificate();
        let due = now() + CERTIFICATE_VALIDITY - RENEW_BEFORE_EXPIRY;
        for (at, leads, expected) in [
            (now(), true, CertificateStep::Serve),
            (now(), false, CertificateStep::Serve),
            (due - MAX_CLOCK_SKEW, true, CertificateStep::Serve),
            (due + MAX_CLOCK_SKEW, true, CertificateStep::Renew),
            (due + MAX_CLOCK_SKEW, false, CertificateStep::Serve),
            (now() + CERTIFICATE_VALIDITY + MAX_CLOCK_SKEW, true, CertificateStep::Create),
            (now() + CERTIFICATE_VALIDITY + MAX_CLOCK_SKEW, false, CertificateStep::Create),
            (now() - 2 * MAX_CLOCK_SKEW, false, CertificateStep::Create),
        ] {
            // `at` is the current time of the test case.
            let step = next_step(Some(&made), SERVICE_HOST, at, leads);
            assert_eq!(step, expected, "{:?} after its creation", at.duration_since(now()));
        }
        assert_eq!(next_step(None, SERVICE_HOST, now(), false), CertificateStep::Create);
        assert_eq!(next_step(Some(&made), "another.svc", now(), false), CertificateStep::Create);
    }

    mod manager_tests {
        use http::{Request, Response, StatusCode};
        use kube::client::Body;
        use serde_json::Value;
        use tower_test::mock::{self, Handle};

        use super::*;
        use crate::leader::Elector;

        type Server = Handle<Request<Body>, Response<Body>>;

        const SECRET_PATH: &str = "/api/v1/namespaces/cleave-system/secrets/cleave-webhook";
        const WEBHOOK_PATH: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/cleave-webhook";

        fn new_manager() -> (CertificateManager, CertificateReceiver, Server) {
            let (service, server) = mock::pair();
            let client = kube::Client::new(service, "default");
            let (_, claim) = Elector::new(Api::namespaced(client.clone(), "default"), "l".into(), "me".into());
            let (manager, served) = CertificateManager::new(&client, "cleave-system", "cleave-webhook".into(), claim);
            (manager, served, server)
        }

        fn secret_object(data: &BTreeMap<String, ByteString>) -> Value {
            json!({"metadata": {"name": "cleave-webhook", "resourceVersion": "7"}, "data": data})
        }

        fn webhook_object(bundle: Option<&ByteString>) -> Value {
            let mut webhook = json!({"name": "gate.cleave.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "clientConfig": {"service": {"namespace": "cleave-system", "name": "cleave-webhook"}}});
            if let Some(bundle) = bundle {
                webhook["clientConfig"]["caBundle"] = json!(bundle);
            }
            json!({"metadata": {"name": "cleave-webhook"}, "webhooks": [webhook]})
        }

        /// Answers only the expected requests. Returns the bodies of the requests.
        async fn answer_requests(server: &mut Server, expected: Vec<(&str, &str, StatusCode, Value)>) -> Vec<Value> {
            let mut bodies = Vec::new();
            for (method, path, status, answer) in expected {
                let (request, reply) = server.next_request().await.unwrap();
                let (parts, body) = request.into_parts();
                assert_eq!((parts.method.as_str(), parts.uri.path()), (method, path));
                let bytes = body.collect_bytes().await.unwrap();
                bodies.push(serde_json::from_slice(&bytes).unwrap_or(Value::Null));
                let answer = Body::from(answer.to_string().into_bytes());
                reply.send_response(Response::builder().status(status).body(answer).unwrap());
            }
            bodies
        }

        fn stored_certificate(body: &Value) -> Certificate {
            let data: BTreeMap<String, ByteString> = serde_json::from_value(body["data"].clone()).unwrap();
            Certificate::from_secret_data(&data).unwrap().unwrap()
        }

        fn conflict_status() -> Value {
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "changed", "reason": "Conflict", "code": 409})
        }

        #[tokio::test(start_paused = true)]
        async fn the_first_replica_creates_and_publishes_a_certificate() {
            let (mut manager, served, mut server) = new_manager();
            let empty = secret_object(&BTreeMap::new());
            let (updated, bodies) = tokio::join!(
                manager.update(now(), false),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, empty.clone()),
                        ("PUT", SECRET_PATH, StatusCode::OK, empty),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, webhook_object(None)),
                        ("PATCH", WEBHOOK_PATH, StatusCode::OK, webhook_object(None)),
                    ]
                )
            );
            updated.unwrap();
            assert_eq!(bodies[1]["metadata"]["resourceVersion"], "7", "only one of two concurrent writes succeeds");
            let made = stored_certificate(&bodies[1]);
            assert!(made.is_trusted(SERVICE_HOST, now() + RENEW_BEFORE_EXPIRY));
            let change = &bodies[3]["webhooks"][0];
            assert_eq!(change["name"], "gate.cleave.dev");
            assert_eq!(change["clientConfig"]["caBundle"], bodies[1]["data"][AUTHORITIES_ENTRY]);
            assert_eq!(served.borrow().as_ref().unwrap().cert, made.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn a_second_replica_serves_the_certificate_of_the_first_replica() {
            let (mut manager, served, mut server) = new_manager();
            let (updated, _) = tokio::join!(
                manager.update(now(), true),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&BTreeMap::new())),
                        ("PUT", SECRET_PATH, StatusCode::CONFLICT, conflict_status()),
                    ]
                )
            );
            updated.unwrap_err();
            assert!(served.borrow().is_none());
            let made = new_certificate();
            let (updated, _) = tokio::join!(
                manager.update(now(), true),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&made.secret_data())),
                        (
                            "GET",
                            WEBHOOK_PATH,
                            StatusCode::OK,
                            webhook_object(Some(&made.secret_data()[AUTHORITIES_ENTRY]))
                        ),
                    ]
                )
            );
            updated.unwrap();
            assert_eq!(served.borrow().as_ref().unwrap().cert, made.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn a_renewed_certificate_is_published_before_it_is_served() {
            let (mut manager, served, mut server) = new_manager();
            let old = new_certificate();
            let due = now() + CERTIFICATE_VALIDITY - RENEW_BEFORE_EXPIRY + MAX_CLOCK_SKEW;
            let known = webhook_object(Some(&old.secret_data()[AUTHORITIES_ENTRY]));
            // A process that does not lead keeps the stored certificate.
            let (updated, _) = tokio::join!(
                manager.update(due, false),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&old.secret_data())),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                    ]
                )
            );
            updated.unwrap();
            assert_eq!(served.borrow().as_ref().unwrap().cert, old.served.cert);
            let (updated, bodies) = tokio::join!(
                manager.update(due, true),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&old.secret_data())),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                        ("PUT", SECRET_PATH, StatusCode::OK, secret_object(&old.secret_data())),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK_PATH, StatusCode::OK, known),
                    ]
                )
            );
            updated.unwrap();
            let new = stored_certificate(&bodies[3]);
            let bundle: ByteString =
                serde_json::from_value(bodies[2]["webhooks"][0]["clientConfig"]["caBundle"].clone()).unwrap();
            assert!(new.is_trusted_by(Some(&bundle)) && old.is_trusted_by(Some(&bundle)));
            assert_eq!(served.borrow().as_ref().unwrap().cert, new.served.cert);
        }

        #[tokio::test(start_paused = true)]
        async fn the_served_certificate_is_kept_when_the_secret_is_invalid_or_missing() {
            let (mut manager, served, mut server) = new_manager();
            let old = new_certificate();
            let known = webhook_object(Some(&old.secret_data()[AUTHORITIES_ENTRY]));
            let (updated, _) = tokio::join!(
                manager.update(now(), false),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&old.secret_data())),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                    ]
                )
            );
            updated.unwrap();
            let mut spoiled = old.secret_data();
            spoiled.insert(CERTIFICATE_ENTRY.to_owned(), ByteString(b"none".to_vec()));
            let (updated, bodies) = tokio::join!(
                manager.update(now(), false),
                answer_requests(
                    &mut server,
                    vec![
                        ("GET", SECRET_PATH, StatusCode::OK, secret_object(&spoiled)),
                        ("GET", WEBHOOK_PATH, StatusCode::OK, known.clone()),
                        ("PATCH", WEBHOOK_PATH, StatusCode::OK, known),
                        ("PUT", SECRET_PATH, StatusCode::CONFLICT, conflict_status()),
                    ]
                )
            );
            updated.unwrap_err();
            let bundle: ByteString =
                serde_json::from_value(bodies[2]["webhooks"][0]["clientConfig"]["caBundle"].clone()).unwrap();
            assert!(old.is_trusted_by(Some(&bundle)), "other replicas still serve it");
            assert_eq!(served.borrow().as_ref().unwrap().cert, old.served.cert);
            let gone =
                json!({"kind": "Status", "status": "Failure", "message": "gone", "reason": "NotFound", "code": 404});
            let (updated, _) = tokio::join!(
                manager.update(now(), true),
                answer_requests(&mut server, vec![("GET", SECRET_PATH, StatusCode::NOT_FOUND, gone)])
            );
            assert!(updated.unwrap_err().to_string().contains("helm upgrade"));
            assert!(served.borrow().is_some());
        }
    }
}
