# The public names. The package loads each of them when it is first used.

from headway.lifecycle.service.client import Client as Client
from headway.lifecycle.service.transport import ServiceError as ServiceError
