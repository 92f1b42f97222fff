#!/usr/bin/env bash
# Makes the certificates of the tests anew, for a hundred years; the expired one is of the year 2000.
set -euo pipefail
cd "$(dirname "$0")"

key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.key"; }

authority() {
  key "$1"
  openssl req -x509 -new -key "$1.key" -subj "/CN=$1" -days 36500 -out "$1.pem"
}

# name, authority, and when it is valid
sign() {
  key "$1"
  openssl req -new -key "$1.key" -subj "/CN=$1" -out "$1.csr"
  : > index
  openssl ca -batch -notext -config <(printf '%s\n' '[ca]' 'default_ca=one' '[one]' \
    'database=index' 'rand_serial=yes' 'new_certs_dir=.' 'default_md=sha256' 'policy=any' \
    'unique_subject=no' '[any]' 'commonName=supplied') -cert "$2.pem" -keyfile "$2.key" \
    -in "$1.csr" -out "$1.pem" -startdate "$3" -enddate "$4"
}

authority ca
authority other_ca
sign worker ca 20200101000000Z 21200101000000Z
sign stranger other_ca 20200101000000Z 21200101000000Z
sign expired ca 20000101000000Z 20000102000000Z
openssl pkey -in worker.key -aes256 -passout pass:words -out locked.key
rm -f ./*.csr index* [0-9A-F]*.pem ca.key other_ca.key
